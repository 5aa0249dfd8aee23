"""Load add-ons: separate distributions, in ``addons/`` of the repository, for work other than quantization.

The core knows them by name alone. An add-on lists what it provides as entry points, in a group named after a version of
this interface, so that an add-on of another version is refused before its code runs. An add-on is imported only when
used, and its failures become one sentence. Alternative not taken: plugins with hooks at every step. An add-on is called
explicitly, and a run without it has the same record.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_quant.errors import ResourceError, SdQuantError, of_the_machine
from sd_quant.text import one_line

INTERFACE = 1  # version of the objects that entry points provide; docs/extending.md lists them


def points(addon: str, name: str) -> list[EntryPoint]:
    """Return the add-on's entry points of this name, of any interface version; an empty list if not installed."""
    return [point for point in entry_points(name=name) if point.group.startswith(f"sd_quant.{addon}.")]


def loaded(addon: str, name: str, needing: str) -> Any:
    """Load an entry point that ``needing`` needs. Raises ResourceError if the add-on is missing, outdated or broken."""
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
    """Convert any exception of an add-on's code in the block to an SdQuantError, whose message is one sentence."""
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
    """Return the folder of an add-on's code, on which its results depend; None if not installed. Imports nothing."""
    names = {point.module.partition(".")[0] for point in entry_points(group=f"sd_quant.{addon}.{INTERFACE}")}
    specs = filter(None, map(find_spec, sorted(names)))
    return next((Path(spec.submodule_search_locations[0]) for spec in specs), None)
