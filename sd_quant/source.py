"""Hash this package's own code, so that cached results of other code are computed again.

A result depends only on the files that its code imports: an edit of the report does not invalidate a calibration.
Imports are read from the text of a file. A package whose ``__init__`` holds code lists modules of its folder in tables
and imports them later, so its whole folder counts. Alternative not taken: ``sys.modules``, which depends on what else
the process has done.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sd_quant.files import digest, sha256
from sd_quant.places import PACKAGE


def source_digest(*modules: str, package: Path = PACKAGE) -> str:
    """Hash with SHA-256 the files that these modules import, directly or indirectly; all of ``package`` by default."""
    files = imported(modules, package) if modules else everything(package)
    return digest(*(f"{path.relative_to(package).as_posix()} {sha256(path)}" for path in sorted(files)))


def everything(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def imported(modules: tuple[str, ...], package: Path) -> set[Path]:
    """Return the files of modules such as ``calibration.collection`` and, recursively, of their imports."""
    files: set[Path] = set()
    waiting = [path for module in modules for path in files_of(module, package)]
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += [file for module in imports_of(path, package.name) for file in files_of(module, package)]
    return files


@cache
def files_of(module: str, package: Path) -> list[Path]:
    """Return a module's file, and all files of each enclosing package whose ``__init__`` holds code."""
    files: list[Path] = []
    place = package
    for name in module.split("."):
        place = place / name
        start = place / "__init__.py"
        if start.is_file() and start.stat().st_size:
            files += everything(place)
    return [*files, *(path for path in [place.with_suffix(".py")] if path.is_file())]


@cache
def imports_of(path: Path, package: str) -> list[str]:
    """Return the package's modules that a file imports anywhere, without the package's name."""
    if path.suffix != ".py":
        return []
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")]
