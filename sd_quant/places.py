"""Where relative paths lead, and where what ships with the project lies.

What a user names is looked for from the current folder, then in ``HOME``: the repository, or in an installed package
``shipped``, which holds copies of the repository's ``conf`` and ``checkpoints``. What is written goes below the current
folder. The road not taken is to work in the repository wherever the command was given: an installed package has none,
and a path that the shell has completed would not be found.
"""

import hashlib
import re
from pathlib import Path

from sd_quant.errors import ConfigError, ResourceError

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # links in the repository, files in a wheel
HOME = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else SHIPPED
CONF = HOME / "conf"
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")  # in the name of a folder
LONGEST_NAME = 120
FILES = re.compile(r"\.(json|html|csv|md|parquet|png|yaml|log|part|lock)$", re.IGNORECASE)  # beside folders of jobs
GROUPS = [CONF]  # folders of Hydra's groups: ours, and those that the user adds to the search path


def input_path(path: str | Path) -> Path:
    """Absolute: where it exists from the current folder, else in ``HOME``; from the current folder if in neither."""
    path = Path(path).expanduser()
    here, shipped = Path.cwd() / path, HOME / path
    return shipped if shipped.exists() and not here.exists() else here


def folder_name(text: str) -> str:
    """``text`` as the name of one folder: it leads nowhere else, is not hidden, and no file beside it is called so."""
    name = FILES.sub(r"-\1", UNSAFE.sub("-", text).lstrip(".")) or "unnamed"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:8]}"


def output_path(path: str | Path) -> Path:
    """Absolute, from the current folder."""
    return Path.cwd() / Path(path).expanduser()


def existing(knob: str, path: str, expected: str) -> Path:
    """``input_path``. Raises ConfigError, which says where was looked, when nothing is there."""
    found = input_path(path)
    if not found.exists():
        raise ConfigError(f"{knob} names {path}, which does not exist{looked_in(path)}; give {expected}")
    return found


def looked_in(path: str | Path) -> str:
    """`` (looked in A and B)`` for a relative path, for an absolute one nothing."""
    if Path(path).expanduser().is_absolute():
        return ""
    return f" (looked in {' and '.join(dict.fromkeys(map(str, (Path.cwd(), HOME))))})"


def lasting(path: str) -> str:
    """The path as a record keeps it for commands that are given elsewhere: absolute, unless it leads into ``HOME``."""
    found = input_path(path)
    return path if Path(path).is_absolute() or found == HOME / path else str(found)


def shown(path: Path) -> str:
    """A path as a person reads it: relative to the current folder where it lies in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def link(path: Path) -> str:
    """The path as a URL, which terminals open at a click."""
    return path.absolute().as_uri()


def check_shipped() -> None:
    """Raises ResourceError when the package was installed without what belongs to it."""
    if not (CONF / "quantize.yaml").is_file():
        raise ResourceError(f"{CONF} is missing: sd-quant was installed without its configuration; install it again")
