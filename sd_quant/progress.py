"""Progress of long work: a bar with an ETA on a terminal, plain lines in a log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

LOG = logging.getLogger(__name__)


class ConsoleFormatter(logging.Formatter):
    """``14:03:59 export: 33.9 s``; of anything above INFO the level too, and no logger's name."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = record.message if record.levelno <= logging.INFO else f"{record.levelname}: {record.message}"
        return f"{record.asctime} {message}"


def duration(seconds: float) -> str:
    """In the unit that a person would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[], object]]:
    """Yields a function to call once per finished unit."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=description, leave=False) as bar:
            yield lambda: bar.update()
        return
    started, done, said = time.monotonic(), 0, time.monotonic()

    def advance() -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if now - said >= 30 and done < total:
            said = now
            left = (now - started) * (total / done - 1)
            LOG.info("%s: %d of %d, about %s to go", description, done, total, duration(left))

    yield advance


def each(items: Sequence, description: str) -> Iterator:
    """The ``items``, one of which is finished when the next is asked for."""
    with progress(len(items), description) as advance:
        for item in items:
            yield item
            advance()
