"""Work that goes on beside other work, in a thread: compiled code that lets Python's other threads run.

The road not taken is a process: its imports and what it is given take longer than the work of a small model.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class NoLongerWanted(Exception):
    """Raised in the work by the function that it is given, when what went on beside it has failed."""


@contextmanager
def beside(work: Callable[[Callable[[], None]], Result]) -> Iterator[Future[Result]]:
    """``work`` goes on while the block runs, which gets its future.

    ``work`` is given a function to call now and then, which raises NoLongerWanted when the block has failed. The block
    ends when the work has.
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
    """The future of work that is done."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
