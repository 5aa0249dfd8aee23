"""Add-ons: distributions of their own, ``addons/`` of the repository, that bring what is not about quantization.

The core knows them by name alone. An add-on lists what it has as entry points, in a group that says for which version
of this interface they are, so one of another version is refused before its code runs. Nothing of an add-on is imported
before it is used, and what goes wrong in it is one sentence. The road not taken is a plugin that is called at every
step: an add-on is asked, and a run without it has the same record.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_quant.errors import ResourceError, SdQuantError, of_the_machine
from sd_quant.text import one_line

INTERFACE = 1  # of what ``loaded`` gives, by the names of entry points; docs/extending.md lists them


def points(addon: str, name: str) -> list[EntryPoint]:
    """The add-on's entry points of this name, whatever their interface; none where it is not installed."""
    return [point for point in entry_points(name=name) if point.group.startswith(f"sd_quant.{addon}.")]


def loaded(addon: str, name: str, needing: str) -> Any:
    """The object behind an entry point. Raises ResourceError, whose sentence begins with ``needing``, without it."""
    found, install = points(addon, name), f"pip install 'sd-quant[{addon}]'"
    if not found:
        raise ResourceError(f"{needing} needs the add-on {addon}, which is not installed; install it with: {install}")
    point = found[0]
    installed, interface = f"the add-on {addon} {point.dist.version}", point.group.rpartition(".")[2]
    if interface != str(INTERFACE):
        raise ResourceError(
            f"{needing} needs {installed} with interface {INTERFACE}, found interface {interface}; install the one of "
            f"this version of sd-quant with: {install} --force-reinstall --no-deps"
        )
    try:
        return point.load()
    except Exception as error:  # its code may raise anything
        said = one_line(f"{type(error).__name__}: {error}", 200)
        raise ResourceError(f"{installed} cannot be imported ({said}); install it again with: {install}") from error


@contextmanager
def at_work(addon: str) -> Iterator[None]:
    """Raises SdQuantError, one sentence, in place of any exception of an add-on's code."""
    try:
        yield
    except SdQuantError:
        raise
    except Exception as error:
        said = one_line(f"{type(error).__name__}: {error}", 300)
        raise of_the_machine(error) or SdQuantError(
            f"the add-on {addon} failed ({said}), which changes nothing of the run; report it to its authors"
        ) from error


def code_of(addon: str) -> Path | None:
    """The folder of an add-on's code, on which its results depend; None where it is not installed. Imports nothing."""
    names = {point.module.partition(".")[0] for point in entry_points(group=f"sd_quant.{addon}.{INTERFACE}")}
    specs = filter(None, map(find_spec, sorted(names)))
    return next((Path(spec.submodule_search_locations[0]) for spec in specs), None)
