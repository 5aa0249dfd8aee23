"""Work that runs share, done once: folders of files under a hash of everything that they depend on.

A run gets links to an entry's files, so it stays whole when the entry goes, and costs no disk while it is there. An
entry is made in a temporary folder and renamed, under a lock that ends with its process; it is checked against its
hashes whenever it is used, and made again when it is damaged. When the cache outgrows its limit, what was used longest
ago goes first. The road not taken is joblib.Memory, which pickles results and hashes arguments, not files.
"""

import fcntl
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sd_quant.errors import ConfigError
from sd_quant.files import digest, sha256, write_json

LOG = logging.getLogger(__name__)
MOST_MANIFEST = 2**20  # bytes; one has about a thousand
MANIFEST = "manifest.json"
READ_ONLY = 0o444  # an entry's files are also those of the runs that use it


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Alone with ``path`` among all processes, which wait for each other; ``waiting`` is logged by one that has to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if not try_lock(file):
            LOG.info("%s", waiting or f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_lock(path: Path) -> IO[str]:
    """The file at ``path``, made if it is not there.

    Raises ConfigError when a link, a pipe or a folder stands there: a cache may be open to others, and who opens a pipe
    waits for ever.
    """
    with suppress(IsADirectoryError):
        if not path.is_symlink():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "r+", encoding="utf-8")
            os.close(descriptor)
    raise ConfigError(f"{path} is no file, expected one by which processes wait for each other; remove it")


def try_lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Cache:
    """``directory`` None keeps nothing. ``limit_bytes`` is for all entries together."""

    directory: Path | None
    limit_bytes: float = 0

    def entry(self, kind: str, origin: Mapping[str, object]) -> Path:
        """The folder of what is made for this ``origin``; there may be none yet."""
        assert self.directory is not None
        return self.directory / kind / digest(json.dumps(origin, sort_keys=True))[:32]

    def holds(self, kind: str, origin: Mapping[str, object]) -> bool:
        """Whether ``provide`` would find this in the cache, unless it is damaged."""
        return self.directory is not None and (self.entry(kind, origin) / MANIFEST).exists()

    def provide(self, kind: str, origin: Mapping[str, object], target: Path, make: Callable[[Path], object]) -> None:
        """``target`` holds the files that ``make(folder)`` writes for this ``origin``, from the cache if it has them.

        ``origin`` is JSON and names everything that the files depend on. What else ``target`` holds stays there.
        """
        target.mkdir(parents=True, exist_ok=True)
        if self.directory is None:
            make(target)
            return
        entry, described = self.entry(kind, origin), json.loads(json.dumps(origin))
        with locked(lock_of(entry), f"the same {kind} is being made already: waiting for it"):
            if names := sound(entry, described):
                LOG.info("%s comes from the cache", f"{kind} of {origin['part']}" if "part" in origin else kind)
            else:
                names = fill(entry, described, make)
            os.utime(entry / MANIFEST)
            for name in names:
                link(entry / name, target / name)
        self.trim(spared=entry)

    def trim(self, spared: Path) -> None:
        """Remove what was used longest ago, as far as the limit asks for it, but not ``spared`` or what is in use.

        What a killed process was making goes too.
        """
        for abandoned in self.directory.glob("*/.*.part"):
            with open_lock(abandoned.with_suffix(".lock")) as lock:
                if try_lock(lock):
                    shutil.rmtree(abandoned, ignore_errors=True)
        manifests = sorted(self.directory.glob(f"*/*/{MANIFEST}"), key=used)
        sizes = {manifest.parent: size_of(manifest.parent) for manifest in manifests}
        excess = sum(sizes.values()) - self.limit_bytes
        for entry, size in sizes.items():
            if excess <= 0:
                return
            if entry == spared:
                continue
            with open_lock(lock_of(entry)) as lock:
                if try_lock(lock):
                    LOG.info("the cache is over its limit: %s goes, unused for the longest time", entry)
                    shutil.rmtree(entry, ignore_errors=True)
                    excess -= size


def lock_of(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.lock")


def used(manifest: Path) -> float:
    with suppress(OSError):  # another process has just removed it
        return manifest.stat().st_mtime
    return time.time()


def size_of(entry: Path) -> int:
    total = 0
    for path in entry.iterdir() if entry.is_dir() else ():
        with suppress(OSError):
            total += path.stat().st_size
    return total


def fill(entry: Path, origin: object, make: Callable[[Path], object]) -> list[str]:
    """The folder appears whole or not at all; the names of its files."""
    temporary = entry.with_name(f".{entry.name}.part")
    for leftover in (temporary, entry):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    temporary.mkdir(parents=True)
    try:
        make(temporary)
        files = {path.name: {"sha256": sha256(path), "bytes": path.stat().st_size} for path in temporary.iterdir()}
        for name in files:
            (temporary / name).chmod(READ_ONLY)
        write_json(temporary / MANIFEST, {"origin": origin, "files": files})
        temporary.rename(entry)
        return list(files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sound(entry: Path, origin: object) -> list[str]:
    """The names of an entry's files if it was made from this ``origin`` and each is there with its hash, else none.

    One line is logged when an entry is damaged. Other users of the machine may write in the cache, so no link in an
    entry is followed, and nothing but a regular file is opened.
    """
    if not os.path.lexists(entry):
        return []
    try:
        manifest = json.loads(regular(entry / MANIFEST, MOST_MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        whole = manifest["origin"] == origin and all(
            Path(name).name == name and sha256(regular(entry / name)) == found["sha256"]
            for name, found in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files, whole = {}, False
    if not (whole and files):
        LOG.warning("the cache's entry %s is damaged; it is made again", entry)
        return []
    return list(files)


def regular(path: Path, most: float = float("inf")) -> Path:
    """``path``. Raises ValueError unless it is a regular file of at most ``most`` bytes, no link and not in one."""
    if path.parent.is_symlink() or not stat.S_ISREG((found := path.lstat()).st_mode) or found.st_size > most:
        raise ValueError(f"{path} is no regular file of at most {most} bytes")
    return path


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the disk is another one."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
