"""The facts that a program's script writes of each case, and ``check`` reads.

Scripts run in environments of their own, so this imports nothing but Python's own modules.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
Tensors = Mapping[str, Any]


@cache
def asked() -> dict[str, Any]:
    """The request, whose file is a script's argument, until the script gives its program other ones."""
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def write_facts(
    opened: Callable[[dict, Facts], object], packages: Iterable[str] = (), versions: Mapping[str, str] = {}
) -> None:
    """Has each case of the request ``opened``, which fills its facts as far as it comes; an exception is among them.
    They are written after each case, because a program may end the process, with the versions of ``packages`` and those
    that nobody can ask pip for."""
    request, cases = asked(), dict[str, Facts]()
    installed = {package: version(package) for package in packages}
    for case in request["cases"]:
        facts: Facts = {"opened": "", "far": "", "missing": [], "left": [], "quantized": 0, "layers": {}}
        cases[case["name"]] = facts
        try:
            opened(case, facts)
        except Exception as error:
            far = "computing" if facts["opened"] else "opening"
            facts["far"] = f"{far}: {type(error).__name__}: {str(error)[:200]}"
        written = {"versions": {**versions, **installed}, "cases": cases}
        Path(request["facts"]).write_text(json.dumps(written, indent=1), encoding="utf-8")


def relative_error(found: Any, expected: Any) -> float:
    """Of tensors; infinite where a number is missing, because max passes over NaN."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(error.nan_to_num(float("inf")))


def errors_of_layers(stored: Tensors, output_of: Callable[[str, Any], Any]) -> dict[str, float]:
    """The largest relative error of any layer, by what it is compared with; none where no layer is stored.
    ``output_of`` returns the program's output of a layer, by its name in the file and its input."""
    layers = {key.partition("|")[0] for key in stored}
    outputs = {layer: output_of(layer, stored[f"{layer}|input"]) for layer in layers}
    errors = {
        kind: [relative_error(outputs[layer], stored[f"{layer}|{kind}"]) for layer in layers]
        for kind in ("exact", "rounded")
    }
    return {kind: max(each) for kind, each in errors.items()} if layers else {}


def otherwise(name: str, held: Any, stored: Any, casts: bool = False) -> list[str]:
    """What a program holds otherwise than the file: a tensor's numbers, or the dtype unless it ``casts`` wide ones.
    Codes and scales of one byte have to have the same dtype always: codes that are cast to numbers look equal."""
    narrow = 1 in (stored.element_size(), held.element_size())
    if held.dtype != stored.dtype and (narrow or not casts):
        return [f"{name}: {held.dtype}, {stored.dtype} in the file"]
    same = bool((held.float().flatten() == stored.float().flatten()).all()) if held.numel() == stored.numel() else False
    return [] if same else [f"{name}: other numbers than in the file"]


def as_taken(held: Tensors, stored: Tensors, places: Mapping[str, str] | None = None, casts: bool = False) -> Facts:
    """What a program did not find, and what it did not take as it is in the file, by the ``places`` of its tensors."""
    places = places or {name: name for name in stored}
    left = []
    for name, tensor in stored.items():
        own = held.get(places[name])
        left += [name] if own is None else otherwise(name, own, tensor, casts)
    return {"missing": sorted(held.keys() - places.values()), "left": left}
