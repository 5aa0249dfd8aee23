"""The folder of a result, with a list of its files.

Replacing a result removes only files on its list: a user's other files stay. Paths are never built from the list, which
is only compared with existing files, so a manipulated list cannot name files elsewhere.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from sd_quant.errors import ConfigError
from sd_quant.files import read_regular

FIGURES = "hand_over.json"  # written last; a folder that has it is ours, and so are the files that it names


def check_free(folder: Path) -> None:
    """Raise ConfigError unless ``folder`` is missing, empty, or holds an earlier result and nothing else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is no folder of ours; set hydra.run.dir to another folder")
    if others := sorted(set(files_in(folder)) - own_files(folder)):
        raise ConfigError(
            f"{folder} exists and holds {others[0]}, which was not handed over by us; move it, or set hydra.run.dir to "
            "another folder"
        )


def remove_result(folder: Path) -> None:
    """Remove the files of an earlier result, and folders that become empty."""
    for name in own_files(folder):
        (folder / name).unlink()
    if not folder.is_symlink():
        for place, _, _ in os.walk(folder, topdown=False):
            if not os.listdir(place):
                os.rmdir(place)


def own_files(folder: Path) -> set[str]:
    """Return the names, relative to ``folder``, of the existing files that its list names; none without a list."""
    try:
        listed = json.loads(read_regular(folder / FIGURES))["files"]
        return set(files_in(folder)) & {*listed, FIGURES}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files, links and other entries below ``folder``; links are not followed."""
    if folder.is_symlink():
        return
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (str((Path(place) / name).relative_to(folder)) for name in (*files, *links))
