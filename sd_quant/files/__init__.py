"""Write files atomically, and read untrusted files within bounds.

A file is written under a temporary name in its folder, flushed, and renamed, so that its name never points at half a
file. The temporary name contains the process id, so that leftovers of a dead process are removed at the next attempt.
An untrusted file is opened by ``open_regular``, which refuses a pipe or a device instead of waiting for it, and
placeholders of files that were not downloaded, such as Git LFS pointers. The modules of this folder parse untrusted
files within bounds of time and memory. None executes or extracts anything, and each imports only those below it.

    images, image_files    images, decoded by Pillow within bounds, and which files of a folder are images
    folders                JSON, and weights in one file or in shards, in a diffusers folder
    checks, schema         names, shapes and values of tensors; entries of a configuration
    torch_weights,
    safetensors            the two formats of weights, located and read without their own libraries
    tensors                a tensor that stays in its file, and the weights of a network
    plain_yaml             YAML without the features that can take hours
    tokenizer_steps        the steps of a tokenizer.json that native code executes
    archive                a file in a tar, or a file of its own, as a range of bytes
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from sd_quant.errors import FULL, ArtifactError, ConfigError, ResourceError, SdQuantError, of_the_machine
from sd_quant.text import one_line

TEMPORARY = ".unfinished-"
HOST = re.sub(r"\W+", "_", socket.gethostname())[:30]
UNFINISHED = re.compile(r"\.unfinished-.*|\..+\.(\w+-)?\d+\.part")  # temporary names of any process
ABANDONED = re.compile(rf"\..+[.-]{HOST}-(\d+)(?:\.part|-\w+)")  # temporary names of this host, with the process id
MOST_TEXT = 2**26  # bytes of a table or a record of another run
LONGEST_NAME = 200  # bytes, because a temporary name is longer
MOST_OF_A_START = 512  # bytes in which ``STAND_INS`` are looked for
STAND_INS = {  # placeholders of files that were not downloaded, by their first bytes, and what to do
    rb"version https?://[\w./-]+/spec/v\d": "a pointer of Git LFS; run git lfs pull in the folder that was cloned",
    rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|(\?xml[^>]*>\s*<)?error)\b": "a web page; download the file itself",
    rb'\s*\{\s*"(errors?|detail|message)"\s*:': "a server's message; do what it says and download the file again",
}


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, then rename it to ``path`` or, on failure, remove it. ResourceError means a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    temporary = path.with_name(f".{path.name}.{HOST}-{os.getpid()}.part")
    try:
        yield temporary
        for entry in (temporary, *temporary.rglob("*")):
            if entry.is_file():
                with entry.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno in FULL:
            raise ResourceError(f"the disk is full: {path} could not be written; free some space and rerun") from error
        raise
    finally:
        remove(temporary)


def temporary_folder(directory: Path) -> TemporaryDirectory:
    """Return a temporary folder in ``directory``, after removing those of dead processes."""
    remove_abandoned(directory)
    return TemporaryDirectory(dir=directory, prefix=f"{TEMPORARY}{HOST}-{os.getpid()}-")


@cache
def remove_abandoned(directory: Path) -> None:
    """Remove the temporary files of dead processes of this host in ``directory``, once per process."""
    with suppress(PermissionError):  # a folder may be writable and not readable
        for path in list(directory.iterdir()):
            match = ABANDONED.fullmatch(path.name)
            if match and not is_alive(int(match[1])):
                remove(path)


def is_alive(process: int) -> bool:
    """Return whether a process of this host, of any user, is running."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def remove(path: Path) -> None:
    """Remove a file, a link or one of our own temporary folders."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def refuse_stand_in(name: object, start: bytes) -> None:
    """Raise ArtifactError, naming ``name``, if a file's first bytes ``start`` show a placeholder (``STAND_INS``)."""
    for pattern, what in STAND_INS.items():
        if re.match(pattern, start, re.IGNORECASE):
            begins = repr(one_line(start.decode(errors="replace"), 80))
            raise ArtifactError(f"{name} begins with {begins}, so it is no file to be read here but {what}")


def check_downloaded(path: Path) -> None:
    """Raise ArtifactError if ``path``, or a file in this folder, is a placeholder of a file that was not downloaded."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            open_regular(file).close()


def open_regular(path: Path, most: float = math.inf) -> BinaryIO:
    """Open a regular file as ``open_unread`` does. Also raises ArtifactError for a placeholder (``STAND_INS``)."""
    with ExitStack() as failing:
        file = failing.enter_context(open_unread(path, most))
        refuse_stand_in(path, os.pread(file.fileno(), MOST_OF_A_START, 0))
        failing.pop_all()
    return file


def open_unread(path: Path, most: float = math.inf) -> BinaryIO:
    """Open a regular file, whatever its content. Raises OSError for anything else, and for more than ``most`` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    bounded = "" if most == math.inf else f" of at most {most:.0f} bytes"
    raise OSError(errno.EINVAL, f"no regular file{bounded}", str(path))


def read_regular(path: Path, most: float = MOST_TEXT) -> bytes:
    """Return all bytes of a regular file. Raises OSError and ArtifactError as ``open_regular`` does."""
    with open_regular(path, most) as file:
        return file.read()


@contextmanager
def refusing(
    what: str, *kinds: type[Exception], advice: str = "fetch it again", folder: Path | None = None
) -> Iterator[None]:
    """Turn exceptions of these ``kinds``, by default all, in the block into ArtifactError: ``what``, cause, ``advice``.

    If a file in ``folder`` was not downloaded, the error names that file instead.
    """
    try:
        yield
    except (ArtifactError, ResourceError):
        raise
    except BaseException as error:
        if not isinstance(error, kinds or Exception) and (kinds or not is_panic(error)):
            raise
        if folder is not None:
            check_downloaded(folder)
        kind = "" if type(error) is ValueError or isinstance(error, SdQuantError) else f"{type(error).__name__}: "
        raise ArtifactError(f"{what} ({one_line(f'{kind}{error}', 300)}); {advice}") from error


def is_panic(error: BaseException) -> bool:
    """Return whether the error is a panic of native Rust code, which is no subclass of Exception."""
    return type(error).__name__ == "PanicException"


def check_room(path: Path, needed: float, what: str = "") -> None:
    """Raise ResourceError if the disk of ``path`` has fewer than ``needed`` bytes free; ``what`` names their use."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{path} needs up to {needed / 1e9:.2f} GB{what} and the disk has {free / 1e9:.2f} GB free; make room or "
            "choose another disk"
        )


def check_writable(directory: Path, knob: str = "hydra.run.dir", what: str = "the output directory") -> None:
    """Raise ConfigError unless ``directory``, which ``knob`` names, can be made; leaves nothing behind.

    The check makes a folder in the closest existing parent: permissions are no proof, /proc denies what they allow.
    """
    parent = directory.absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        if max(map(len, map(os.fsencode, directory.parts))) > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, "a name in it is too long")
        with temporary_folder(parent):
            pass
    except OSError as error:
        if (fault := of_the_machine(error)) is not None:
            raise fault from error
        raise ConfigError(f"{what} {directory} cannot be written, because of {parent}; set {knob}") from error


def check_replaceable(path: Path, knob: str, begins: bytes, what: str) -> None:
    """Raise ConfigError unless ``path``, which ``knob`` names, can be written and is new or a file of the same kind.

    ``begins`` is a regular expression for the first bytes of this kind of file, and ``what`` names it in messages.
    """
    start = b""
    with suppress(OSError), open_unread(path) as file:  # a folder or a pipe has no such start
        start = file.read(MOST_OF_A_START)
    if os.path.lexists(path) and not re.match(begins, start):
        raise ConfigError(
            f"{what} would replace {path}, which is none, expected a new name, or that of an earlier one; change {knob}"
        )
    check_writable(path.parent if os.path.lexists(path) else path, knob, what)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # untrusted names hold lone surrogates


def write_json(path: Path, content: object) -> None:
    """Write JSON. Raises SdQuantError, naming the entry, for NaN or infinity, instead of which a record holds null."""
    if found := next(not_finite(content), None):
        raise SdQuantError(f"{path.name} cannot be written, because {found} in it is no finite number; report this run")
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def not_finite(content: object, name: str = "") -> Iterator[str]:
    """Yield path and value, as ``fidelity.psnr.values.0 (nan)``, of every NaN and infinity in ``content``."""
    if isinstance(content, float) and not math.isfinite(content):
        yield f"{name.lstrip('.') or 'all'} ({content})"
    elif isinstance(content, Mapping | list | tuple):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from not_finite(value, f"{name}.{key}")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*texts: str) -> str:
    """Return the SHA-256 of the sequence of texts; ("ab",) and ("a", "b") differ."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
