"""Cache results that runs share, as folders of files under a hash of everything that the files depend on.

A run gets hard links to an entry's files: they stay valid when the entry is removed, and take no disk space until then.
An entry is made in a temporary folder and renamed, under a lock that ends with its process. Its file hashes are checked
at every use, and a damaged entry is made again. When an entry is made and the cache exceeds its limit, the least
recently used entries are removed. If the cache itself cannot be read or written, results are made without it.
Alternative not taken: joblib.Memory, which pickles results and hashes arguments, not files.
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
from functools import partial
from pathlib import Path
from typing import IO

from sd_quant.errors import ConfigError
from sd_quant.files import digest, remove, sha256, write_json

LOG = logging.getLogger(__name__)
MOST_MANIFEST = 2**20  # bytes; a usual one has about a thousand
MANIFEST = "manifest.json"
READ_ONLY = 0o444  # runs link to the same files


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold the lock file ``path`` in the block. A wait is logged with the text ``waiting``, then with its duration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if not try_lock(file):
            LOG.info("%s", waiting or f"waiting for another process that holds {path}")
            start = time.monotonic()
            fcntl.flock(file, fcntl.LOCK_EX)
            LOG.info("waited %.0f s for it", time.monotonic() - start)
        yield


def open_lock(path: Path) -> IO[str]:
    """Open or create a lock file. Raises ConfigError for a link, a folder, a pipe or a device."""
    with suppress(IsADirectoryError):
        if not path.is_symlink():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "r+", encoding="utf-8")
            os.close(descriptor)
    raise ConfigError(f"{path} is no file, expected one by which processes wait for each other; remove it")


def lockable(folder: Path) -> bool:
    """Return whether lock files can be made in ``folder``; if not, warn that results are not stored there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        open_lock(folder / ".lock").close()
    except OSError as error:
        LOG.warning("nothing is kept in %s, which cannot be written (%s)", folder, error.strerror)
        return False
    return True


def try_lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Cache:
    """A cache in ``directory``, or no caching if None; ``limit_bytes`` limits all entries together."""

    directory: Path | None
    limit_bytes: float = 0

    def entry(self, kind: str, origin: Mapping[str, object]) -> Path:
        """Return the entry's folder, existing or not, for results of this ``kind`` and ``origin``."""
        assert self.directory is not None
        return self.directory / kind / digest(json.dumps(origin, sort_keys=True))[:32]

    def provide(self, kind: str, origin: Mapping[str, object], target: Path, make: Callable[[Path], object]) -> None:
        """Put the files that ``make(folder)`` writes for ``origin`` into ``target``, from the cache if it has them.

        ``origin`` is JSON and names everything that the files depend on. Other files in ``target`` stay.
        """
        self.provide_all(kind, {target.name: origin}, target.parent, lambda _, folder: make(folder))

    def provide_all(
        self, kind: str, origins: Mapping[str, Mapping[str, object]], target: Path, make: Callable[[str, Path], object]
    ) -> None:
        """Put the files that ``make(name, folder)`` writes into ``target/<name>``, for each name in ``origins``.

        Of processes that need the same entry, on one machine or on several that share the cache, one makes it and the
        others wait. If it dies, its unfinished entry is lost.
        """
        left = list(origins)
        for name in left:
            (target / name).mkdir(parents=True, exist_ok=True)
        if self.directory is None:
            for name in left:
                make(name, target / name)
            return
        found = 0
        try:
            for name, origin in origins.items():
                entry = self.entry(kind, origin)
                with locked(lock_of(entry), f"another process makes the same {kind}: waiting for it"):
                    found += put(entry, origin, target / name, partial(make, name))
                    left.remove(name)
        except OSError as error:
            self.leave_out(error)
            for name in left:
                make(name, target / name)
        if found:
            part = origin.get("part")
            alone = f"{kind} of {part}" if part else kind
            LOG.info("from the cache: %s", f"{found} of {len(origins)} {kind}" if len(origins) > 1 else alone)
        if found < len(origins):
            self.trim(spared=entry)

    def leave_out(self, error: OSError) -> None:
        """Warn that the cache is not used because of ``error``; raise ``error`` if its file is outside the cache."""
        if not Path(str(error.filename)).is_relative_to(self.directory):
            raise error
        LOG.warning("the cache %s cannot be used (%s): this is made without it", self.directory, error.strerror)

    def trim(self, spared: Path) -> None:
        """Remove unfinished entries and, above the limit, the least recently used, except ``spared`` and any locked."""
        for abandoned in self.directory.glob("*/.*.part"):
            with suppress(OSError), open_lock(abandoned.with_suffix(".lock")) as lock:
                if try_lock(lock):
                    shutil.rmtree(abandoned, ignore_errors=True)
        manifests = sorted(self.directory.glob(f"*/*/{MANIFEST}"), key=last_use)
        sizes = {manifest.parent: folder_bytes(manifest.parent) for manifest in manifests}
        excess = sum(sizes.values()) - self.limit_bytes
        for entry, size in sizes.items():
            if excess <= 0:
                return
            if entry == spared:
                continue
            with suppress(OSError), open_lock(lock_of(entry)) as lock:  # it is another user's, or gone
                if try_lock(lock):
                    LOG.info("the cache is over its limit: %s goes, unused for the longest time", entry)
                    shutil.rmtree(entry, ignore_errors=True)
                    excess -= size


def put(entry: Path, origin: Mapping[str, object], target: Path, make: Callable[[Path], object]) -> bool:
    """Link the files of ``entry``, locked by the caller, into ``target``; return False if it had to be made first."""
    described = json.loads(json.dumps(origin))
    there = sound(entry, described)
    for name in there or fill(entry, described, make):
        link(entry / name, target / name)
    os.utime(entry / MANIFEST)
    return bool(there)


def lock_of(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.lock")


def last_use(manifest: Path) -> float:
    with suppress(OSError):  # another process has just removed it
        return manifest.stat().st_mtime
    return time.time()


def folder_bytes(entry: Path) -> int:
    total = 0
    with suppress(OSError):
        for path in entry.iterdir():
            total += path.stat().st_size
    return total


def fill(entry: Path, origin: object, make: Callable[[Path], object]) -> list[str]:
    """Make an entry, which appears as a whole or not at all, and return the names of its files."""
    temporary = entry.with_name(f".{entry.name}.part")
    for leftover in (temporary, entry):
        remove(leftover)
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
    """Return the names of an entry's files if it is for this ``origin`` and each file has its hash, else an empty list.

    A damaged entry is logged. Other users of the machine may write into the cache, so no link in an entry is followed,
    and only regular files are opened.
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
    """Return ``path``. Raises ValueError unless it is a regular file of at most ``most`` bytes, not via a link."""
    if path.parent.is_symlink() or not stat.S_ISREG((found := path.lstat()).st_mode) or found.st_size > most:
        raise ValueError(f"{path} is no regular file of at most {most} bytes")
    return path


def link(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where linking fails, as on another disk."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
