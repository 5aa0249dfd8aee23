"""The assignment that a target holds, of the one that a recipe has made, and what its consumer computes of it.

A layer that the target cannot hold stays in high precision, with its reason. Where that leaves no layer, or all have a
branch that would be lost, the recipe is refused: another fits, and the sentence names it.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from sd_quant.errors import ConfigError
from sd_quant.hand_over import FP16, OF_THE_RECIPE, PER_ROW, Target
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import simulate

LARGEST_CODE, SMALLEST_SCALE = 127, 1e-12  # of inputs that are quantized row by row as they come


def adapted(assignment: Mapping[str, LayerAssignment], target: Target) -> dict[str, LayerAssignment]:
    """The rows of ``assignment`` as ``target`` holds them.

    Raises ConfigError when it holds none of the quantized layers, or they have a branch that it cannot hold.
    """
    rows = {name: held(layer, target) for name, layer in assignment.items()}
    quantized = [layer for layer in assignment.values() if layer.format is not None]
    kept = [rows[layer.name] for layer in quantized if rows[layer.name].format is not None]
    if not kept:
        found = ", ".join(sorted({layer.format for layer in quantized})) or "nothing"
        raise ConfigError(
            f"{target.name} holds {', '.join(target.formats)} and none of the layers in {found}; "
            "hand over a run with another quantize= preset"
        )
    branches = sum(layer.low_rank is not None for layer in kept)
    if branches and not target.low_rank:
        raise ConfigError(
            f"{branches} layers have a low-rank branch, which {target.name} cannot hold; hand over a run with "
            "quantize.rank=0"
        )
    return rows


def held(layer: LayerAssignment, target: Target) -> LayerAssignment:
    """One row: as it is, with other inputs, or in high precision with the reason."""
    if layer.role == "attention":
        if target.attention or layer.activation_format is None:
            return layer
        reason = f"{target.name} holds no products of attention"
        return replace(layer, activation_format=None, attention_amax=None, key_mean=None, reason=reason)
    if layer.format is None:
        return layer
    if (reason := why_not_held(layer, target)) is not None:
        smoothing = layer.pre_quant_scale if layer.folded_into else None  # what a norm has taken over stays divided
        return replace(
            without_inputs(layer), format=None, reason=reason, weight_amax=None, weight_axis=None, rounded=None,
            low_rank=None, pre_quant_scale=smoothing,
        )  # fmt: skip
    return layer if target.formats[layer.format] == OF_THE_RECIPE or is_static(layer, target) else without_inputs(layer)


def is_static(layer: LayerAssignment, target: Target) -> bool:
    return target.formats[layer.format] not in (FP16, PER_ROW)


def without_inputs(layer: LayerAssignment) -> LayerAssignment:
    """With inputs in high precision."""
    return replace(layer, activation_format=None, activation_amax=None, activation_zero_point=0, bias=None)


def why_not_held(layer: LayerAssignment, target: Target) -> str | None:
    """Why a quantized layer stays in high precision, or None."""
    fmt = layer.format
    if fmt not in target.formats:
        return f"{target.name} holds no weights in {fmt}"
    if len(layer.weight_shape) > 2 and fmt not in target.convolutions:
        return f"{target.name} holds no convolutions in {fmt}"
    if layer.name.endswith(target.excluded.get(fmt, ())):
        return f"{target.name} reads the model's kind off the shape of its weight"
    if layer.multiplies and fmt not in target.multiplied:
        return f"{target.name} cannot multiply the inputs of {fmt} by a pre_quant_scale; smoothing=none needs none"
    if layer.activation_zero_point and not target.zero_point:
        return f"{target.name} holds no inputs that are shifted"
    if is_static(layer, target) and target.formats[fmt] != OF_THE_RECIPE and layer.activation_format is None:
        return f"{target.name} wants a scale of the inputs of {fmt}, and the recipe leaves them in high precision"
    if fmt in target.per_channel and target.per_channel[fmt] != (layer.weight_axis == 0):
        return f"{target.name} holds {'no' if target.per_channel[fmt] else 'only'} one scale for a weight in {fmt}"
    return None


def per_row(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook: the input [..., in] fake-quantized with a scale for each row, its largest magnitude / 127."""
    x = inputs[0]
    scale = (x.float().abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=SMALLEST_SCALE)
    codes = (x.float() / scale).round().clamp(-LARGEST_CODE - 1, LARGEST_CODE)
    return ((codes * scale).to(x), *inputs[1:])


def simulate_target(module: nn.Module, rows: Mapping[str, LayerAssignment], target: Target) -> nn.Module:
    """Make of ``module``, in place, what the consumer computes of the ``rows`` that ``adapted`` has made."""
    module = simulate(module, rows)
    for layer in rows.values():
        if layer.format is not None and target.formats[layer.format] == PER_ROW:
            module.get_submodule(layer.name).register_forward_pre_hook(per_row)
    return module
