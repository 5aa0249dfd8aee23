"""A sweep of two jobs through a launcher, and the faults that Ray and Slurm have alike."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from subprocess import Popen

from sd_quant.cache import open_lock, try_lock
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE

from .shared import json_of, link_cache, same, without_times

JOBS = ["quant_level=1", "quant_level=2"]


@dataclass(frozen=True)
class Launcher:
    """How a sweep is started, and what becomes of its jobs where the command is killed."""

    name: str = "none"
    knobs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    killed: str = ""
    said: Sequence[str] = ()  # by a command beside the jobs of one that was killed


@dataclass(frozen=True)
class Sweep:
    """Of two jobs, in a folder beside a cache that has what an undisturbed sweep has left."""

    folder: Path
    launcher: Launcher
    start: Callable[..., Popen]
    arguments: Callable[..., list[str]]  # without a launcher
    undisturbed: list[dict]

    def begin(self, *more: str) -> Popen:
        return self.start(*self.arguments(*self.launcher.knobs, *more), **self.launcher.environment)

    def begun(self, *more: str, file: str = "config.yaml", text: str = "") -> Popen:
        """A command whose jobs have written this file, with a text in it."""
        process, files = self.begin(*more), [self.folder / job / file for job in JOBS]
        while not all(path.exists() and text in path.read_text() for path in files):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return process

    def is_whole(self, command: Popen | None = None) -> None:
        """After this command ends well, the sweep has its table and no process holds a lock."""
        if command is not None:
            ended(command)
        assert same(without_times(self.folder / "summary.csv"), self.undisturbed)
        assert not [lock for lock in self.folder.parent.rglob(".*lock") if held(lock)]

    def does_the_rest(self, kept: str) -> str:
        """What the same command says, which does what is missing, and not what is there."""
        record = (self.folder / kept / RECORD).stat()
        stdout, _ = ended(self.begin())
        assert "1 done before" in stdout and (self.folder / kept / RECORD).stat() == record
        self.is_whole()
        return stdout

    def failure_of(self, job: str) -> str:
        return json_of(self.folder / job / FAILURE)["reason"]


def held(lock: Path) -> bool:
    with open_lock(lock) as file:
        return not try_lock(file)


def ended(process: Popen, code: int = 0) -> tuple[str, str]:
    """What a command says, which ends with this code within ten minutes."""
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == code, stderr[-3000:]
    return stdout, stderr


def killed(process: Popen) -> None:
    """Kill the process and all others of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def given_again(sweep: Sweep) -> str:
    killed(sweep.begun())
    stdout, _ = ended(sweep.start(*sweep.arguments()))
    assert all(words in stdout for words in sweep.launcher.said)
    sweep.is_whole()
    return sweep.launcher.killed


def two_at_once(sweep: Sweep) -> str:
    other = sweep.folder.with_name("other")
    commands = sweep.begin(), sweep.begin(f"hydra.sweep.dir={other}")
    for command in commands:
        ended(command)
    sweep.is_whole()
    replace(sweep, folder=other).is_whole()
    return "both tables are right"


def eight_jobs(sweep: Sweep) -> str:
    alone, given = sweep.folder.with_name("alone"), ("quant_level=2,3", "alpha=0.3,0.5,0.7,0.9")
    cache = link_cache(sweep.folder.with_name("cache"), sweep.folder.with_name("cache_alone"))
    moments = [time.monotonic()]
    ended(sweep.start(*sweep.arguments(*given, f"hydra.sweep.dir={alone}", f"cache.dir={cache}")))
    moments.append(time.monotonic())
    assert "sacct" not in "".join(ended(sweep.begin(*given)))
    moments.append(time.monotonic())
    rows = without_times(sweep.folder / "summary.csv")
    assert len(rows) == 8 and same(rows, without_times(alone / "summary.csv"))
    one, nodes = (f"{end - begin:.0f} s" for begin, end in pairwise(moments))
    return f"the table of a sweep without a launcher; {nodes} on two nodes of a core; {one} in one process"


ALIKE: dict[str, Callable[[Sweep], str]] = {  # what befalls a sweep: what is done, and the outcome
    "none, eight jobs": eight_jobs,
    "the command is killed, and given again without a launcher": given_again,
    "two sweeps at once share a cache": two_at_once,
}
