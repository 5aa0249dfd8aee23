"""Progress of long work: a bar with an ETA on a terminal, plain lines in a log, and never silence.

Whoever does something that may take long says so with ``working`` or ``progress``. While anything is done and no line
has been printed for QUIET seconds, a thread prints one: what is being done, how far it is, and how much is left by what
it has taken so far. The road not taken is a line for each finished unit: one unit may take minutes.
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
A_LOOK = 1.0  # seconds between two looks at the clock


class ConsoleFormatter(logging.Formatter):
    """``14:03:59 export: 33.9 s``; of anything above INFO the level too, and no logger's name."""

    last_line = 0.0  # on the clock of time.monotonic

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ConsoleFormatter.last_line = time.monotonic()
        message = record.message if record.levelno <= logging.INFO else f"{record.levelname}: {record.message}"
        return f"{record.asctime} {message}"


class NotSaidAtTheEnd(logging.Filter):
    """Keeps from the console what a command ends with; the log file has it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "said_at_the_end", False)


def duration(seconds: float) -> str:
    """In the unit that a person would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@dataclass(eq=False)
class Work:
    """Something that is being done, of ``total`` units where these are known."""

    description: str
    total: int | None = None
    done: int = 0
    bar: Any = None  # tqdm's, on a terminal
    started: float = field(default_factory=lambda: time.monotonic())

    def line(self) -> str:
        """``calibrate: 3 of 10, about 84 s to go``."""
        taken = time.monotonic() - self.started
        if not self.total:
            return f"{self.description}: {duration(taken)} so far"
        left = f"about {duration(taken * (self.total / self.done - 1))} to go" if self.done else None
        return f"{self.description}: {self.done} of {self.total}, {left or f'{duration(taken)} so far'}"


GOING_ON: list[Work] = []  # in all threads; the innermost is the last
CHANGES = threading.Lock()  # of GOING_ON and of the thread that watches it
watching: threading.Thread | None = None


@contextmanager
def working(description: str, total: int | None = None) -> Iterator[Work]:
    """In the block no ``QUIET`` seconds pass without a line."""
    global watching
    work = Work(description, total)
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
    """Say what goes on, until nothing does."""
    global watching
    said = time.monotonic()
    while True:
        time.sleep(A_LOOK)
        with CHANGES:
            if not GOING_ON:
                watching = None
                return
            work = GOING_ON[-1]
        if (bar := work.bar) is not None:
            bar.refresh()  # its clock goes on
        elif time.monotonic() - max(said, ConsoleFormatter.last_line) >= QUIET:
            said = time.monotonic()
            LOG.info("%s", work.line())


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[], object]]:
    """Yields a function to call once per finished unit."""
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
    """The ``items``, one of which is finished when the next is asked for."""
    with progress(len(items), description) as advance:
        for item in items:
            yield item
            advance()
