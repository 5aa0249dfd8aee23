"""Resolve paths: of files that a user names, of files that ship with the project, of files to write.

A relative path is resolved against the current folder, then against ``HOME``: the repository, or in an installed
package ``shipped``, a copy of the repository's ``conf`` and ``checkpoints``. Output goes below the current folder.
Alternative not taken: to resolve against the repository always. An installed package has none, and a path completed by
the shell would not be found.
"""

import hashlib
import os
import re
from pathlib import Path

from sd_quant.errors import ConfigError, ResourceError

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # links in the repository, files in a wheel
HOME = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else SHIPPED
CONF = HOME / "conf"
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")  # characters that are replaced in the name of a folder
LONGEST_NAME = 120
FILE_ENDING = re.compile(r"\.(json|html|csv|md|png|yaml|log|part|lock)$", re.IGNORECASE)  # of files in a sweep
GROUPS = [CONF]  # folders with groups of presets: ours, and those that the user adds to Hydra's search path


def input_path(path: str | Path) -> Path:
    """Return the absolute path: in the current folder, unless the file exists only in ``HOME``."""
    path = Path(path).expanduser()
    here, shipped = Path.cwd() / path, HOME / path
    return shipped if os.path.exists(shipped) and not os.path.exists(here) else here  # whatever their length


def folder_name(text: str) -> str:
    """Return ``text`` as a name for one folder: no path, not hidden, and without an ending such as ``.json``."""
    name = FILE_ENDING.sub(r"-\1", UNSAFE.sub("-", text).lstrip(".")) or "unnamed"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:8]}"


def output_path(path: str | Path) -> Path:
    """Return the absolute path, relative to the current folder."""
    return Path.cwd() / Path(path).expanduser()


def existing(knob: str, path: str, expected: str) -> Path:
    """Return ``input_path(path)``. Raises ConfigError, with ``knob`` and what is ``expected``, if it is missing."""
    found = input_path(path)
    if not os.path.exists(found):
        raise ConfigError(f"{knob} names {path}, which does not exist{looked_in(path)}; give {expected}")
    return found


def existing_file(knob: str, path: str) -> Path:
    """Return ``input_path(path)``. Raises ConfigError when it is missing or no regular file."""
    found = existing(knob, path, "an existing file, or null")
    if not found.is_file():
        raise ConfigError(f"{knob} is {path}, expected a file, and no folder, pipe or device")
    return found


def looked_in(path: str | Path) -> str:
    """Return the folders searched for a relative path, as `` (looked in A and B)``; empty for an absolute one."""
    if Path(path).expanduser().is_absolute():
        return ""
    return f" (looked in {' and '.join(dict.fromkeys(map(str, (Path.cwd(), HOME))))})"


def lasting(path: str) -> str:
    """Return the path to store in a record, valid from any folder: absolute, or relative if found in ``HOME``."""
    found = input_path(path)
    return path if Path(path).is_absolute() or found == HOME / path else str(found)


def shown(path: Path) -> str:
    """Return the path for display: relative if it lies in the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def url(path: Path) -> str:
    """Return the path as a URL, which terminals open at a click."""
    return path.absolute().as_uri()


def check_shipped() -> None:
    """Raise ResourceError when the package was installed without its configuration files."""
    if not (CONF / "quantize.yaml").is_file():
        raise ResourceError(f"{CONF} is missing: sd-quant was installed without its configuration; install it again")
