"""Values of nested mappings, by their dotted names."""

from collections.abc import Mapping
from copy import deepcopy


def with_values(mapping: Mapping, values: Mapping[str, object]) -> dict:
    """A copy in which each value of ``values``, such as ``{"fidelity.psnr.mean": None}``, stands at its name."""
    copy = deepcopy(dict(mapping))
    for dotted, value in values.items():
        *outer, last = dotted.split(".")
        inner = copy
        for name in outer:
            inner = inner[int(name) if isinstance(inner, list) else name]
        inner[last] = value
    return copy
