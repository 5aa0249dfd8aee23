"""Run work in a thread beside other work; it should spend its time in compiled code that releases the GIL.

The road not taken is a process: its imports and the transfer of its input take longer than the work of a small model.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
NAMED = "whose "  # prefix of the names of threads whose messages say whose they are


class NoLongerWanted(Exception):
    """Raised in the work when the block beside it has failed."""


@contextmanager
def beside(work: Callable[[Callable[[], None]], Result], whose: str = "") -> Iterator[Future[Result]]:
    """Run ``work`` while the block runs, and yield its future; the block ends when both have.

    ``work`` gets a function to call now and then, which raises NoLongerWanted when the block has failed. ``whose`` is
    the name of the work in its log messages, where those of other work stand among them.
    """
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise NoLongerWanted

    with ThreadPoolExecutor(1, thread_name_prefix=f"{NAMED}{whose}:" if whose else "") as pool:
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


def naming_threads(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    """``make``, a factory of log records, with the name of the work in front of what its thread says."""

    def made(*args, **kwargs) -> logging.LogRecord:
        record, (name, separator, _) = make(*args, **kwargs), threading.current_thread().name.rpartition(":")
        if separator and name.startswith(NAMED):
            record.msg, record.args = f"{name.removeprefix(NAMED)}: {record.getMessage()}", ()
        return record

    return made


logging.setLogRecordFactory(naming_threads(logging.getLogRecordFactory()))  # Hydra replaces handlers and their filters
