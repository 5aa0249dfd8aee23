"""One input to one reader, and what became of it.

A reader may refuse in one sentence or load what the file says. Everything else is a failure: another exception, a
crash, ten seconds, memory over the cap, a wrong value, a process that was started, a file that was written, or one that
was read which does not belong to the input.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from sd_quant.errors import ArtifactError, ConfigError, SdQuantError

SECONDS = 10  # of the processor, so that a busy machine is no fault of the reader
LONGEST_MESSAGE = 1500
REFUSED, SAME, OTHER = "refused", "loaded", "other values"
SECRET = "not_for_readers"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTING = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect"}


@dataclass(frozen=True)
class Reader:
    """``files`` are sound; ``mutate`` makes of a drawn recipe those that differ, None for one that is missing.

    ``read`` returns what was read, in a form that compares; ``check`` raises AssertionError when the files do not say
    that. ``weight`` is its part of a run's inputs; the test-suite tries nearly as many.
    """

    name: str
    files: Mapping[str, bytes]
    recipes: SearchStrategy
    mutate: Callable[[Any], dict[str, bytes]]
    read: Callable[[Path], Any]
    check: Callable[[Path, Any], None] = lambda folder, found: None
    weight: int = 20
    writes: bool = False  # into the input's own folder


@dataclass
class Place:
    """Where inputs of one reader are laid out: ``input``, and beside it what no reader may touch."""

    reader: Reader
    root: Path
    touched: set[str] = field(default_factory=set)
    expected: Any = None

    def __post_init__(self):
        self.input, self.outside = self.root / "input", self.root / "outside"
        self.outside.mkdir(parents=True, exist_ok=True)
        (self.root / SECRET).write_text("nothing that an input may name")
        self.lay(self.reader.files)
        self.expected = self.reader.read(self.input)
        self.reader.check(self.input, self.expected)

    def lay(self, files: Mapping[str, bytes | None]) -> None:
        for name, content in files.items():
            path = self.input / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)

    def put(self, recipe: Any) -> None:
        """The sound files, changed as the recipe says."""
        self.lay({name: self.reader.files.get(name) for name in self.touched})
        files = self.reader.mutate(recipe)
        self.touched = set(files)
        self.lay(files)


class TookTooLong(BaseException):
    """Not an Exception: readers that catch those may not catch this."""


class Wrong(AssertionError):
    """A forbidden act of a reader."""


def outcome(place: Place, limit: float = SECONDS) -> tuple[str, float]:
    """How the input that lies in ``place`` was taken, and in how many seconds. Raises Wrong."""
    before = contents(place)
    start = time.process_time()
    try:
        with watched(place) as seen, limited(limit):
            found = place.reader.read(place.input)
        kind = SAME if found == place.expected else OTHER
    except SdQuantError as error:
        check_refusal(error)
        kind = REFUSED
    except TookTooLong:
        raise Wrong(f"took longer than {limit:g} s") from None
    except (Exception, RecursionError) as error:
        raise Wrong(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}") from error
    seconds = time.process_time() - start
    if seen:
        raise Wrong(f"did what no reader may: {', '.join(seen)[:400]}")
    if contents(place) != before:
        raise Wrong(f"left other files than were there: {sorted(contents(place) ^ before)[:5]}")
    if kind == OTHER:
        try:
            place.reader.check(place.input, found)
        except Exception as error:
            raise Wrong(f"loaded what the file does not say: {type(error).__name__}: {str(error)[:400]}") from error
    return kind, seconds


def contents(place: Place) -> set[str]:
    shown = place.outside if place.reader.writes else place.root
    return {os.path.join(folder, name) for folder, _, names in os.walk(shown) for name in names}


def check_refusal(error: SdQuantError) -> None:
    text = str(error)
    if type(error) not in (ArtifactError, ConfigError):
        raise Wrong(f"refused as {type(error).__name__}, not as a broken file: {text[:400]}")
    if not text or len(text) > LONGEST_MESSAGE:
        raise Wrong(f"refused in {len(text)} letters: {text[:400]!r}")
    if not text.isprintable():
        raise Wrong(f"refused in more than one line, or with letters that a terminal obeys: {text[:400]!r}")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


_now: tuple[Place, list[str]] | None = None  # whose input is being read, and what was seen; hooks cannot be removed
_hooked = False


@contextmanager
def watched(place: Place) -> Iterator[list[str]]:
    """A list that fills with what the block starts, connects to, writes, or reads of what is beside the input."""
    global _now, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    seen: list[str] = []
    _now = place, seen
    try:
        yield seen
    finally:
        _now = None


def _audit(event: str, arguments: tuple) -> None:
    if _now is None:
        return
    place, seen = _now
    if event in STARTING:
        seen.append(event)
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
        inside = os.path.abspath(path).startswith(f"{place.input}{os.sep}")
        # an unnamed file in TMPDIR is how a gzipped archive is unpacked
        unnamed = flags & os.O_TMPFILE == os.O_TMPFILE or path == str(place.outside)
        if (isinstance(mode, str) and set(mode) & set("wax+") or flags & WRITING) and not unnamed:
            if not (place.reader.writes and inside):
                seen.append(f"write {path}")
        elif SECRET in path or path.startswith("/proc/self/environ"):
            seen.append(f"read {path}")
