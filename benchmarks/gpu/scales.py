"""Assignments of the full-size UNet in a file of a few MB, so that no minute of a GPU goes to a processor's work.

The network's weights are random but the same everywhere (``sides.fill``), so what was derived of them on one machine
holds on another. Kept is what cannot be computed again at once: smoothing in fp16, ranges of inputs, shifted biases.
Ranges of weights are those of the smoothed weights, and come from them again.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.recipe import Recipe

SMOOTHING = ("pre_quant_scale", "output_scale")
FROM_THE_WEIGHT = "of the weight"  # in place of a range that is computed again
Assignment = dict[str, LayerAssignment]


def range_of(weight: Tensor, layer: LayerAssignment) -> Tensor:
    """The largest magnitude of the smoothed weight, fp32 [out] or [1]."""
    smoothed = rewritten(weight, layer).abs()
    return smoothed.flatten(1).amax(1) if layer.weight_axis == 0 else smoothed.amax().view(1)


def rounded(layer: LayerAssignment) -> LayerAssignment:
    """The row with its smoothing as it is kept: in fp16, whatever reads it."""
    found = {name: getattr(layer, name) for name in SMOOTHING}
    return replace(layer, **{name: value.half().float() for name, value in found.items() if value is not None})


def save(path: Path, assignments: Mapping[str, Mapping[str, LayerAssignment]], recipes: Mapping[str, Recipe],
         unet: nn.Module) -> None:  # fmt: skip
    """Write assignments by the names of their ``recipes``; ``unet`` has the weights that they were derived of."""
    tensors: dict[str, Tensor] = {}
    kept: dict[bytes, str] = {}  # where equal numbers are already

    def stored(value: Any, half: bool) -> Any:
        if isinstance(value, tuple):
            return [stored(each, half) for each in value]
        if not isinstance(value, Tensor):
            return value
        tensor = (value.half() if half else value.float()).contiguous().cpu()
        key = kept.setdefault(bytes(tensor.numpy().tobytes()), f"tensor{len(kept)}")
        tensors[key] = tensor
        return {"tensor": key}

    told: dict[str, Any] = {}
    for name, assignment in assignments.items():
        rows = []
        for given in assignment.values():
            layer = rounded(given)
            row = {field.name: stored(getattr(layer, field.name), field.name in SMOOTHING) for field in fields(layer)}
            if layer.weight_amax is not None and layer.role != "attention":
                weight = unet.get_parameter(f"{layer.name}.weight")
                if torch.allclose(range_of(weight, given), layer.weight_amax, rtol=1e-5):
                    row["weight_amax"] = FROM_THE_WEIGHT
            rows.append({key: value for key, value in row.items() if value is not None})
        told[name] = {"recipe": describe(recipes[name]), "layers": rows}
    values = [value for one in told.values() for row in one["layers"] for value in row.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    used = {part["tensor"] for part in parts if isinstance(part, dict)}
    with atomic_path(path) as temporary:
        packed = base64.b64encode(zlib.compress(json.dumps(told).encode(), 9)).decode()  # of 2 MB 0.2
        safetensors.torch.save_file({key: tensor for key, tensor in tensors.items() if key in used}, temporary,
                                    {"assignments": packed})  # fmt: skip


def load(path: Path, name: str, recipe: Recipe, unet: nn.Module) -> Assignment | None:
    """The assignment of this name where the weights of ``unet`` are.

    None where it is not of this ``recipe``, or of a network with other layers.
    """
    with safe_open(path, "pt") as file:
        told = json.loads(zlib.decompress(base64.b64decode(file.metadata()["assignments"]))).get(name)
        if told is None or told["recipe"] != describe(recipe):
            return None
        if {row["name"] for row in told["layers"]} - dict(unet.named_modules()).keys():
            return None
        place = next(unet.parameters()).device

        def read(value: Any) -> Any:
            if isinstance(value, dict):
                return file.get_tensor(value["tensor"]).to(place).float()
            return tuple(map(read, value)) if isinstance(value, list) else value

        found: Assignment = {}
        for row in told["layers"]:
            layer = LayerAssignment(**{key: read(value) for key, value in row.items() if value != FROM_THE_WEIGHT})
            if row.get("weight_amax") == FROM_THE_WEIGHT:
                layer = replace(layer, weight_amax=range_of(unet.get_parameter(f"{layer.name}.weight"), layer))
            found[layer.name] = layer
    return found


def describe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON has it."""
    return json.loads(json.dumps(asdict(recipe), default=str))
