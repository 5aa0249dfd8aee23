"""Writing so that a name never points at half a file: temporary name in the same folder, flush, rename."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from sd_quant.errors import FULL, ResourceError, SdQuantError

TEMPORARY = ".unfinished-"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, renamed to it when the block ends well and removed when it does not.

    The block writes a file there, or a folder. Raises ResourceError when the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
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
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def temporary_folder(directory: Path) -> TemporaryDirectory:
    """In ``directory``, under a name by which the next attempt knows what a killed one has left."""
    return TemporaryDirectory(dir=directory, prefix=TEMPORARY)


def check_room(path: Path, needed: float, what: str = "") -> None:
    """Raises ResourceError when the disk of ``path`` has fewer than ``needed`` bytes free; ``what`` explains them."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{path} needs up to {needed / 1e9:.2f} GB{what} and the disk has {free / 1e9:.2f} GB free; make room or "
            "choose another disk"
        )


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate of a stranger's


def write_json(path: Path, content: object) -> None:
    """Raises SdQuantError for NaN and infinity, naming the entry: a record holds null and a reason instead."""
    if found := next(not_finite(content), None):
        raise SdQuantError(f"{path.name} cannot be written, because {found} in it is no finite number; report this run")
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def not_finite(content: object, name: str = "") -> Iterator[str]:
    """``fidelity.psnr.values.0`` for every NaN and infinity in what is to be JSON."""
    if isinstance(content, float) and not math.isfinite(content):
        yield f"{name.lstrip('.') or 'all'} ({content})"
    elif isinstance(content, Mapping | list | tuple):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from not_finite(value, f"{name}.{key}")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*texts: str) -> str:
    """SHA-256 of texts, told apart."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
