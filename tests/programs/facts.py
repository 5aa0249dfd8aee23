"""The facts that a program's script writes of each case, and ``check`` reads.

Scripts run in environments of their own, so this imports nothing but Python's own modules.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
Tensors = Mapping[str, Any]


def write_facts(request: Mapping, versions: Mapping[str, str], opened: Callable[[dict, Facts], object]) -> None:
    """Has each case of a request ``opened``, which fills its facts as far as it comes; an exception is among them.

    They are written after each case, because a program may end the process.
    """
    written: dict[str, Any] = {"versions": versions, "cases": {}}
    for case in request["cases"]:
        facts: Facts = {"opened": "", "far": "", "missing": [], "left": [], "quantized": 0, "layers": {}}
        written["cases"][case["name"]] = facts
        try:
            opened(case, facts)
        except Exception as error:
            far = "computing" if facts["opened"] else "opening"
            facts["far"] = f"{far}: {type(error).__name__}: {str(error)[:200]}"
        Path(request["facts"]).write_text(json.dumps(written, indent=1), encoding="utf-8")


def relative_error(found: Any, expected: Any) -> float:
    """Of tensors; infinite where a number is missing, because max passes over NaN."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(error.nan_to_num(float("inf")))


def errors_of_layers(stored: Tensors, output_of: Callable[[str, Any], Any]) -> dict[str, float]:
    """The largest relative error of any layer, by what it is compared with; none where no layer is stored.

    ``output_of`` returns the program's output of a layer, by its name in the file and its input.
    """
    layers = {key.partition("|")[0] for key in stored}
    outputs = {layer: output_of(layer, stored[f"{layer}|input"]) for layer in layers}
    errors = {
        kind: [relative_error(outputs[layer], stored[f"{layer}|{kind}"]) for layer in layers]
        for kind in ("exact", "rounded")
    }
    return {kind: max(each) for kind, each in errors.items()} if layers else {}


def otherwise(name: str, held: Any, stored: Any, casts: bool = False) -> list[str]:
    """What a program holds otherwise than the file: a tensor's numbers, or the dtype unless it ``casts`` wide ones.

    Codes and scales of one byte have to have the same dtype always: codes that are cast to numbers look equal.
    """
    narrow = 1 in (stored.element_size(), held.element_size())
    if held.dtype != stored.dtype and (narrow or not casts):
        return [f"{name}: {held.dtype}, {stored.dtype} in the file"]
    same = bool((held.float().flatten() == stored.float().flatten()).all()) if held.numel() == stored.numel() else False
    return [] if same else [f"{name}: other numbers than in the file"]
