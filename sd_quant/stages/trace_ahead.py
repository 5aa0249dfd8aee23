"""A process that traces graphs while the job imports its libraries, opens the model and calibrates.

A trace takes the network's structure alone and one core for a quarter of a minute, of Python that no thread can run
beside. The process leaves graphs in the cache, where the export finds them, or waits for them at the cache's lock. If
it fails it leaves nothing, and the export traces and says what is wrong. Where nothing has been traced yet it begins
before the job knows what is to be traced, because its imports are a third of its work.

While it works torch computes with a thread less: its threads wait for each other without sleeping, so that one of them
that has to share a core costs all the others its time. The roads not taken: the lowest priority, with which it was only
done with its imports when the export began, which traced everything once more; and a fork of the job, whose libraries
have threads of their own by then.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from sd_quant.config import CacheFolder
from sd_quant.places import output_path
from sd_quant.process import cores

TRACES = "sd_quant.stages.trace_parts"


class Tracer:
    """The process, which ends with the ``with`` block. It is started by ``start``, or when it gets something to do."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", TRACES],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            text=True,
        )

    def trace(self, request: dict) -> None:
        """Let it do what ``trace_parts`` reads. It does one request."""
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # it may have failed, which the export finds out
            json.dump(request, pipe)

    def busy(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


def tracer_for(cache: CacheFolder) -> Tracer:
    """A job's tracer, started if the job's cache has no graph yet."""
    tracer = Tracer()
    if cache.dir is not None and several_threads() and not any((output_path(cache.dir) / "graph").glob("*")):
        tracer.start()
    return tracer


def several_threads() -> bool:
    """Whether this process has more than one thread, of which another may take one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores(), int(asked) if asked.isdecimal() else cores()) > 1
