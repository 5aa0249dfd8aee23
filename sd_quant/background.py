"""Run work in a thread beside other work; it should spend its time in compiled code that releases the GIL.

The road not taken is a process: its imports and the transfer of its input take longer than the work of a small model.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class NoLongerWanted(Exception):
    """Raised in the work when the block beside it has failed."""


@contextmanager
def beside(work: Callable[[Callable[[], None]], Result]) -> Iterator[Future[Result]]:
    """Run ``work`` while the block runs, and yield its future; the block ends when both have.

    ``work`` gets a function to call now and then, which raises NoLongerWanted when the block has failed.
    """
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise NoLongerWanted

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, check)
        try:
            yield future
        except BaseException:
            failed.set()
            raise


def done(result: Result) -> Future[Result]:
    """Return the future of work that is finished."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
