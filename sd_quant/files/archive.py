"""Files inside a ``.nemo`` archive, read in place.

The tar headers are read one by one. An archive with anything but regular files and directories with plain names is
refused. Nothing is extracted: a member is a range of the archive's own bytes.
Alternative not taken: ``tarfile.open``. It skips damage at the end, lets the last of two equal names win, reads
extended headers of any declared size into memory, and its extraction filters have been bypassed more than once.
"""

import gzip
import io
import mmap
import os
import shutil
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.files import MOST_OF_A_START, check_room, open_regular, open_unread, refuse_stand_in, refusing

TAR_BLOCK = tarfile.BLOCKSIZE
MAX_MEMBERS = 64
MAX_TEXT = 2**20  # bytes of a configuration
MAX_EXTENDED_HEADER = 64 * 1024  # a long name, a float mtime and a size over 8 GiB need a few hundred bytes
LARGE_READ = 2**20
GZIP_SLACK = 64 * 2**20
GZIP_RATIO = 16  # float weights shrink by a few per cent, a gzip bomb by a factor of about 1000


class OpenFile:
    """A duplicated file descriptor, closed when nothing refers to this object any more."""

    def __init__(self, file: BinaryIO):
        self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class Member:
    """A range of bytes of an open file: one file of an archive, or a whole file."""

    name: str  # for messages
    file: OpenFile
    offset: int  # of its first byte in ``file``
    size: int  # in bytes

    def read(self, start: int, length: int) -> bytearray | mmap.mmap:
        """Return ``length`` bytes of the member, beginning with its byte ``start``.

        Raises ArtifactError if the range leaves the member, if the file became shorter since it was opened, and, when
        ``start`` is 0, if the file was not downloaded.
        """
        if start == 0:
            refuse_stand_in(self.name, os.pread(self.file.descriptor, min(self.size, MOST_OF_A_START), self.offset))
        if start < 0 or length < 0 or start + length > self.size:
            raise ArtifactError(
                f"{self.name} has {self.size} bytes but refers to bytes {start} to {start + length}; "
                "it is damaged, so fetch it again"
            )
        data = mapped_block(length) if length > LARGE_READ else bytearray(length)
        view, position = memoryview(data), self.offset + start
        while view:
            count = os.preadv(self.file.descriptor, [view], position)
            if count == 0:
                raise ArtifactError(f"{self.name} became shorter while it was read; let its writer finish, then rerun")
            view, position = view[count:], position + count
        return data

    def open(self) -> BinaryIO:
        """Return the member as a seekable file."""
        return io.BufferedReader(_MemberStream(self))


def mapped_block(length: int) -> mmap.mmap:
    """Return anonymous memory, in large pages where possible, that goes back to the system when it is freed."""
    block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


class _MemberStream(io.RawIOBase):
    def __init__(self, member: Member):
        self.member, self.position = member, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.member.size}[whence]
        if start + offset < 0:
            raise OSError(f"seek to {start + offset}, before the start of {self.member.name}")
        self.position = start + offset
        return self.position

    def readinto(self, buffer) -> int:
        length = max(0, min(len(buffer), self.member.size - self.position))
        buffer[:length] = self.member.read(self.position, length) if length else b""
        self.position += length
        return length


def open_members(path: Path) -> dict[str, Member]:
    """Return the files of a ``.nemo`` archive, or of a folder, by name without the leading ``./``.

    Raises ConfigError for a missing ``path``, ArtifactError for damage and anything but files and folders below ``./``,
    ResourceError if there is no room to unpack a gzipped archive.
    """
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist; give the path of a .nemo file or an extracted directory")
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file())
        if len(files) > MAX_MEMBERS:
            raise ArtifactError(f"{path} holds {len(files)} files; expected an extracted .nemo, so check the path")
        return {file.name: whole_file(file, f"{path}: {file.name}") for file in files}
    if not path.is_file():
        raise ArtifactError(f"{path} is a device or a pipe; expected a .nemo file or an extracted directory")
    with open_regular(path) as file:
        archive = _gunzipped(path, file) if is_gzipped(path) else OpenFile(file)
    members: dict[str, Member] = {}
    for member_name, member in _tar_members(path, archive):
        if member_name in members:
            raise ArtifactError(f"{path} holds {member_name!r} twice; expected each name once, so fetch it again")
        members[member_name] = member
    return members


def whole_file(path: Path, name: str = "") -> Member:
    """Return a whole file as a member called ``name``, by default its path. Raises ConfigError if it does not exist."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; check the path")
    with open_unread(path) as file:  # of a folder's files not all are read
        return Member(name or str(path), OpenFile(file), 0, os.fstat(file.fileno()).st_size)


def read_text(member: Member) -> bytes:
    """Return all bytes of a configuration file. Raises ArtifactError, before reading, for more than ``MAX_TEXT``."""
    if member.size > MAX_TEXT:
        raise ArtifactError(f"{member.name} has {member.size} bytes; expected at most {MAX_TEXT}, so check the path")
    return bytes(member.read(0, member.size))


def is_gzipped(path: Path) -> bool:
    """Return whether ``path`` is a gzip file, as NeMo's archives were before 1.7."""
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(2) == b"\x1f\x8b"


def is_tar(path: Path) -> bool:
    """Return whether the file begins with the header of a tar."""
    with open_regular(path) as file:
        block = file.read(TAR_BLOCK)
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _gunzipped(path: Path, compressed: BinaryIO) -> OpenFile:
    """Unpack into an unnamed temporary file in $TMPDIR, because tensors are read in any order."""
    check_room(Path(tempfile.gettempdir()), path.stat().st_size, " to unpack a gzipped archive")
    limit = GZIP_SLACK + GZIP_RATIO * path.stat().st_size
    size = 0
    compressed.seek(0)
    damaged = refusing(f"{path} is a damaged or cut gzip file", EOFError, gzip.BadGzipFile, zlib.error)
    try:
        with damaged, tempfile.TemporaryFile() as temporary, gzip.open(compressed) as stream:
            while chunk := stream.read(2**20):
                size += len(chunk)
                if size > limit:
                    raise ArtifactError(
                        f"{path} unpacks to more than {limit} bytes, {GZIP_RATIO} times its size; expected weights, "
                        "which hardly shrink, so do not use this file"
                    )
                temporary.write(chunk)
            temporary.flush()
            return OpenFile(temporary)
    except OSError as error:
        free = shutil.disk_usage(tempfile.gettempdir()).free
        raise ResourceError(
            f"{path} is gzipped and could not be unpacked into {tempfile.gettempdir()} ({error.strerror}, {free} bytes "
            "free); set TMPDIR to a larger disk, or gunzip it once and use the result"
        ) from error


def _tar_members(path: Path, file: OpenFile) -> Iterator[tuple[str, Member]]:
    """Yield name and member of each regular file of a tar. Raises ArtifactError for damage and any other entry."""
    file_size = os.fstat(file.descriptor).st_size
    whole = Member(str(path), file, 0, file_size)
    extended: dict[str, str] | None = None  # of the next member
    position, count = 0, 0
    while True:
        if position + TAR_BLOCK > file_size:
            raise ArtifactError(
                f"{path} ends after {file_size} bytes without the end-of-archive mark of a tar; it is cut off, so "
                "fetch it again"
            )
        block = whole.read(position, TAR_BLOCK)
        if not any(block):
            if position + 2 * TAR_BLOCK > file_size or any(whole.read(position + TAR_BLOCK, TAR_BLOCK)):
                raise ArtifactError(
                    f"{path} has half an end-of-archive mark at byte {position}; it is cut off, so fetch it again"
                )
            if extended is not None:
                raise ArtifactError(f"{path} ends behind an extended tar header that is for no member; fetch it again")
            return
        advice = "expected a plain or gzipped .nemo archive, so check the path or fetch it again"
        what = f"{path} has no valid tar header at byte {position}"
        with refusing(what, tarfile.HeaderError, ValueError, advice=advice):
            header = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
            size = int((extended or {}).get("size", header.size))
        name = (extended or {}).get("path", header.name)
        start = position + TAR_BLOCK
        if size < 0 or start + size > file_size:
            raise ArtifactError(
                f"{path} is cut inside {name!r}: {size} bytes declared, {file_size - start} present; fetch it again"
            )
        count += 1
        if count > 2 * MAX_MEMBERS:  # an extended header counts too
            raise ArtifactError(f"{path} holds more than {MAX_MEMBERS} members; NeMo writes two, so check the path")
        position = start + -(-size // TAR_BLOCK) * TAR_BLOCK
        if header.type == tarfile.XHDTYPE:
            extended = _extended_header(path, whole, start, size)
            continue
        extended = None
        plain_name = _checked_name(path, name)
        if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield plain_name, Member(f"{path}: {plain_name}", file, start, size)
        elif header.type != tarfile.DIRTYPE:
            kind = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}.get(header.type)
            raise ArtifactError(
                f"{path}: member {name!r} is {kind or f'of tar type {header.type!r}'}; expected regular files and "
                "directories only, so do not use this file"
            )


def _extended_header(path: Path, whole: Member, start: int, size: int) -> dict[str, str]:
    """Return the records of a pax header (POSIX.1-2001); tarfile writes one for a fractional modification time."""
    if size > MAX_EXTENDED_HEADER:
        raise ArtifactError(
            f"{path} has an extended tar header of {size} bytes; expected at most {MAX_EXTENDED_HEADER}, so do not use "
            "this file"
        )
    data, records = bytes(whole.read(start, size)), {}
    with refusing(f"{path} has a malformed extended tar header at byte {start}", ValueError):
        while data:
            length = int(data[: data.index(b" ")])
            key, value = data[data.index(b" ") + 1 : length - 1].decode("utf-8").split("=", 1)
            if length < 5 or data[length - 1 : length] != b"\n":
                raise ValueError("a record does not end where it says")
            records[key], data = value, data[length:]
    if any(key.startswith("GNU.sparse") for key in records):
        raise ArtifactError(f"{path} holds a sparse member; expected plain files, so pack it without --sparse")
    return records


def _checked_name(path: Path, name: str) -> str:
    """Return ``name`` without ``./``. Raises ArtifactError when it points outside the archive."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise ArtifactError(f"{path}: member {name!r} points outside the archive; do not use this file")
    return str(pure)
