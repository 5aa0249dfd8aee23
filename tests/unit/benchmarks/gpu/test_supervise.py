"""Tasks in a process that dies, hangs and raises. This file is the worker, too."""

import os
import signal
import sys
import time

import pytest

from benchmarks.gpu.supervise import CRASHED, DONE, FAILED, LATE, NOT_BEGUN, Task, Worker, do_all, serve

pytestmark = pytest.mark.commit


def do(task: dict) -> dict:
    if task["name"] == "raises":
        raise RuntimeError(task.get("why", "so it is"))
    if task["name"] == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task["name"] == "hangs":
        time.sleep(600)
    return {"pid": os.getpid()}


@pytest.fixture
def told():
    found = []

    def run(*names: str | Task, until: float = 100.0, least: float = 1.0) -> list[dict]:
        worker = Worker([sys.executable, "-m", "tests.unit.benchmarks.gpu.test_supervise"], 10.0)
        tasks = [name if isinstance(name, Task) else Task(name, 0.1) for name in names]
        do_all(worker, tasks, time.monotonic() + until, least, lambda task, answer: found.append(answer))
        assert worker.process is None
        return found

    return run


@pytest.mark.slow
def test_one_process_does_them_all_until_it_dies_or_is_late(told):
    first, second, raised, third, died, fourth, late, fifth = told("a", "b", "raises", "c", "dies", "d", "hangs", "e")
    assert [answer["ended"] for answer in (first, second, third, fourth, fifth)] == [DONE] * 5
    assert first["pid"] == second["pid"] == third["pid"] != fourth["pid"] != fifth["pid"]
    assert (raised["ended"], raised["reason"]) == (FAILED, "RuntimeError: so it is")
    assert (died["ended"], died["reason"]) == (CRASHED, f"its process ended with signal {signal.SIGSEGV:d}")
    assert late["ended"] == LATE and late["reason"].startswith("no answer in ")
    poison = Task("raises", 0.1, {"why": "CUDA error: an illegal memory access was encountered"})
    *_, before, failed, after = told("a", poison, "b")
    assert failed["ended"] == FAILED and before["pid"] != after["pid"], "after an error of the GPU"


def test_what_does_not_fit_is_not_begun_and_what_is_shorter_still_is(told):
    long, short = told(Task("long", 1000.0), "short")
    assert long["ended"] == NOT_BEGUN and short["ended"] == DONE
    assert long["reason"].startswith("it would take 1010 s and ")  # with the opening of the worker


if __name__ == "__main__":
    serve(int(sys.argv[sys.argv.index("--answers") + 1]), do)
