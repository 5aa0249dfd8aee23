"""A process that traces graphs while the job imports its libraries, opens the model and calibrates.

A trace needs only the structure of the network and takes one core for a quarter of a minute, in Python, which holds the
interpreter's lock. The process leaves graphs in the cache, where the export finds them or waits for them at the cache's
lock. If it fails it leaves nothing, and the export traces and says what is wrong. If the cache has no graph yet, the
process starts before the job knows what to trace, because its imports are a third of its work.

Meanwhile torch computes with one thread less: its threads wait for each other without sleeping, so a thread that shares
its core delays all others. The roads not taken: the lowest priority, at which the process had only finished its imports
when the export began; and a fork of the job, whose libraries have threads of their own by then.
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
        """Send the one request that ``trace_parts`` reads."""
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
    """Whether this process may use several threads, so that it can spare one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores(), int(asked) if asked.isdecimal() else cores()) > 1
