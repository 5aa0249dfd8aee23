"""Report the progress of long work: a bar on a terminal, lines in a log, and no long silence.

Code that may take long wraps itself in ``working`` or ``progress``. While it runs and no line has been printed for
QUIET seconds, a thread prints one: the work, its progress, and an estimate of the remaining time. Alternative not
taken: a line for each finished unit, because one unit may take minutes.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LOG = logging.getLogger(__name__)
QUIET = 15.0  # seconds without a line, after which one is printed
POLLED_EVERY = 1.0  # seconds between two checks of the clock by the thread


class ConsoleFormatter(logging.Formatter):
    """Log format such as ``14:03:59 export: 33.9 s``, with levels above INFO named; clears the progress bar."""

    last_line = 0.0  # on the clock of time.monotonic

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ConsoleFormatter.last_line = time.monotonic()
        with CHANGES:
            for work in GOING_ON:
                if work.bar is not None:
                    work.bar.clear()
        message = record.message if record.levelno <= logging.INFO else f"{record.levelname}: {record.message}"
        return f"{record.asctime} {message}"


class ConsoleFilter(logging.Filter):
    """Log filter that drops libraries' lines below WARNING, and the error that the command prints as its last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name.partition(".")[0] in ("sd_quant", "__main__")
        return (ours or record.levelno >= logging.WARNING) and not getattr(record, "said_at_the_end", False)


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@dataclass(eq=False)
class Work:
    """Work in progress, of ``total`` units if their number is known."""

    description: str
    total: int | None = None
    done: int = 0
    bar: Any = None  # tqdm's, on a terminal
    started: float = field(default_factory=lambda: time.monotonic())

    def line(self) -> str:
        """Describe the progress, as ``calibrate: 3 of 10, about 84 s to go``."""
        taken = time.monotonic() - self.started
        if not self.total:
            return f"{self.description}: {duration(taken)} so far"
        left = f"about {duration(taken * (self.total / self.done - 1))} to go" if self.done else None
        return f"{self.description}: {self.done} of {self.total}, {left or f'{duration(taken)} so far'}"


GOING_ON: list[Work] = []  # work in progress in all threads, the innermost last
CHANGES = threading.Lock()  # guards GOING_ON and ``watching``
watching: threading.Thread | None = None


@contextmanager
def working(described: str | Work, total: int | None = None) -> Iterator[Work]:
    """Report the block as work in progress, and yield its ``Work``. ``described`` is a description or a ``Work``."""
    global watching
    work = described if isinstance(described, Work) else Work(described, total)
    with CHANGES:
        GOING_ON.append(work)
        if watching is None:
            watching = threading.Thread(target=watch, name="progress", daemon=True)
            watching.start()
    try:
        yield work
    finally:
        with CHANGES:
            GOING_ON.remove(work)


def watch() -> None:
    """Print a line after each silence of QUIET seconds, until no work is in progress."""
    global watching
    said = time.monotonic()
    while True:
        time.sleep(POLLED_EVERY)
        with CHANGES:
            if not GOING_ON:
                watching = None
                return
            work = GOING_ON[-1]
        if (bar := work.bar) is not None:
            bar.refresh()  # to move its clock
        elif time.monotonic() - max(said, ConsoleFormatter.last_line) >= QUIET:
            said = time.monotonic()
            LOG.info("%s", work.line())


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[], object]]:
    """Report the block as work of ``total`` units; yields a function to call once per finished unit."""
    with working(description, total) as work:

        def advance() -> None:
            work.done += 1
            if work.bar is not None:
                work.bar.update()

        if not sys.stderr.isatty():
            yield advance
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=description, leave=False) as bar:
            work.bar = bar
            try:
                yield advance
            finally:
                work.bar = None


def each(items: Sequence, description: str) -> Iterator:
    """Yield the ``items`` and report progress; an item is finished when the next one is requested."""
    with progress(len(items), description) as advance:
        for item in items:
            yield item
            advance()
