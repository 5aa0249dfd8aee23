"""Tasks in a process of their own, one after the other, each with a time in which it has to answer.

What crashes or hangs on a GPU takes its process with it, and nothing that Python does in that process helps. So the
tasks are done by a worker, which is killed when it is late and replaced when it is gone, and the next task begins.
The road not taken is a process for every task: each would open the GPU, build the network and compile anew.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

DONE, FAILED, CRASHED, LATE, NOT_BEGUN = "done", "failed", "crashed", "late", "not begun"
POISONED = ("CUDA error", "AcceleratorError", "illegal memory access")  # after which a process computes nothing more
PATIENCE = 4.0  # times as long as it should take, before a task is given up
Answer = dict[str, Any]  # ``ended``, one of the words above, ``reason`` where it is not DONE, and what the task says


@dataclass(frozen=True)
class Task:
    """A request to a worker with its ``options``; ``seconds`` is the time that it should take."""

    name: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)


class Worker:
    """A process that does tasks. ``opening`` is how many seconds a new one needs before its first."""

    def __init__(self, command: Sequence[str], opening: float):
        self.command, self.opening = command, opening
        self.process: subprocess.Popen | None = None
        self.answers = -1

    def start(self) -> None:
        self.answers, theirs = os.pipe()
        self.process = subprocess.Popen([*self.command, "--answers", str(theirs)], stdin=subprocess.PIPE,
                                        pass_fds=[theirs], start_new_session=True)  # fmt: skip
        os.close(theirs)

    def ask(self, task: Task, seconds: float) -> Answer:
        """What the worker answers within ``seconds``; a new one has ``opening`` more."""
        if self.process is None:
            self.start()
            seconds += self.opening
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone; the pipe of answers says so
            self.process.stdin.write(json.dumps({"name": task.name, **task.options}).encode() + b"\n")
            self.process.stdin.flush()
        told, end = b"", time.monotonic() + seconds
        while not told.endswith(b"\n"):
            if not select.select([self.answers], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close()
                return {"ended": LATE, "reason": f"no answer in {seconds:.0f} s"}
            if not (more := os.read(self.answers, 2**16)):
                code = self.process.wait()
                self.close()
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return {"ended": CRASHED, "reason": f"its process ended with {how}"}
            told += more
        answer = json.loads(told)
        if answer["ended"] == FAILED and any(word in answer["reason"] for word in POISONED):
            self.close()
        return answer

    def close(self) -> None:
        """Kill the process and what it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            os.close(self.answers)
            self.process = None


def serve(answers: int, do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The worker's side: do what stands in the lines of stdin and answer to the file descriptor ``answers``."""
    with os.fdopen(answers, "w") as file:
        for line in sys.stdin:
            try:
                answer = {"ended": DONE, **do(json.loads(line))}
            except Exception as error:  # whatever a library raises: the next task may be well
                traceback.print_exc()
                answer = {"ended": FAILED, "reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
            print(json.dumps(answer), file=file, flush=True)


def do_all(
    worker: Worker, tasks: Iterable[Task], until: float, least: float, told: Callable[[Task, Answer], None]
) -> None:
    """Do tasks in their order until ``until``, a time of ``time.monotonic``, and say of each how it ended.

    A task that would take longer than what is left is not begun; a shorter one behind it may be. How much slower this
    machine is than the tasks expect is learnt from those that are done. A task has PATIENCE times its seconds, at
    ``least`` so many, and never more than what is left.
    """
    taken, expected = 0.0, 0.0
    for task in tasks:
        slower = min(max(taken / expected, 0.1), 10.0) if expected else 1.0
        opening = worker.opening if worker.process is None else 0.0
        needed, left = slower * task.seconds + opening, until - time.monotonic()
        if needed > left:
            told(
                task, {"ended": NOT_BEGUN, "reason": f"it would take {needed:.0f} s and {max(left, 0):.0f} s are left"}
            )
            continue
        start = time.monotonic()
        answer = worker.ask(task, min(max(PATIENCE * slower * task.seconds, least), left - opening))
        if answer["ended"] == DONE:
            taken, expected = taken + time.monotonic() - start - opening, expected + task.seconds
        told(task, answer)
    worker.close()
