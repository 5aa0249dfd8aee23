"""Adapts an assignment to the layers that a foreign format can hold.

A layer that it cannot hold stays in high precision, with the reason. A recipe is refused if that leaves no layer, or if
some would lose their branch; the message names a recipe that fits.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.interchange import IN_BLOCKS, OWN_INPUTS, PER_ROW, STATIC, ForeignFormat
from sd_quant.quantization.assignment import LayerAssignment

REASONS = 2  # the commonest, which a refusal gives


def adapted(assignment: Mapping[str, LayerAssignment], target: ForeignFormat) -> dict[str, LayerAssignment]:
    """The rows of ``assignment`` as ``target`` holds them.

    Raises ConfigError when it holds none of the quantized layers, or they have a branch that it cannot hold.
    """
    rows = {name: held(layer, target) for name, layer in assignment.items()}
    wanted = [layer for layer in assignment.values() if layer.format is not None]
    kept = [layer for layer in rows.values() if layer.format is not None]
    if not kept:
        found = ", ".join(sorted({layer.format for layer in wanted})) or "nothing"
        reasons = Counter(rows[layer.name].reason for layer in wanted)
        because = f" ({'; '.join(str(reason) for reason, _ in reasons.most_common(REASONS))})" if reasons else ""
        raise ConfigError(
            f"{target.name} holds {', '.join(target.formats)} and none of the layers in {found}{because}; "
            "hand over a run with another quantize= preset"
        )
    branches = sum(layer.low_rank is not None for layer in kept)
    if branches and not target.low_rank:
        raise ConfigError(
            f"{branches} layers have a low-rank branch, which {target.name} cannot hold; hand over a run with "
            "quantize.rank=0"
        )
    check_only(rows, target)
    check_fused(rows, target)
    return rows


def check_only(rows: Mapping[str, LayerAssignment], target: ForeignFormat) -> None:
    """Raises ConfigError when a layer is in high precision that the target holds quantized alone."""
    if left := [row for name, row in rows.items() if row.format is None and of_those(name, target.only)]:
        raise ConfigError(
            f"{target.name} computes these layers quantized alone, and {len(left)} are not, such as {left[0].name} "
            f"({left[0].reason}); hand over a run that quantizes all of {', '.join(target.only)}"
        )


def check_fused(rows: Mapping[str, LayerAssignment], target: ForeignFormat) -> None:
    """Raises ConfigError when layers that the target computes as one have inputs smoothed by different vectors."""
    for first, *others in target.fused:
        for name in (name for name in rows if name.endswith(f".{first}")):
            head = name.removesuffix(first)
            mine, *theirs = (multiplied(rows[f"{head}{each}"]) for each in (first, *others) if f"{head}{each}" in rows)
            if any((each is None) != (mine is None) or (each is not None and not each.equal(mine)) for each in theirs):
                raise ConfigError(
                    f"{target.name} computes {name} and {', '.join(others)} as one layer with one smoothing of its "
                    "inputs, and the run smooths each; hand over a run with smoothing=folded or none"
                )


def multiplied(layer: LayerAssignment) -> Tensor | None:
    return layer.pre_quant_scale if layer.multiplies else None


def of_those(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def held(layer: LayerAssignment, target: ForeignFormat) -> LayerAssignment:
    """One row: unchanged, with other inputs, or in high precision with the reason."""
    if layer.role == "attention":
        reason = why_no_attention(layer, target)
        if reason is None:
            return layer
        return replace(layer, activation_format=None, attention_amax=None, key_mean=None, reason=reason)
    if layer.format is None:
        return layer
    if (reason := why_not_held(layer, target)) is not None:
        smoothing = layer.pre_quant_scale if layer.folded_into else None  # as the layer in front multiplies by it
        return replace(
            without_inputs(layer), format=None, reason=reason, weight_amax=None, weight_axis=None, rounded=None,
            low_rank=None, pre_quant_scale=smoothing, rotation=0,
        )  # fmt: skip
    return without_inputs(layer) if target.formats[layer.format] in OWN_INPUTS else layer


def without_inputs(layer: LayerAssignment) -> LayerAssignment:
    """The row with inputs in high precision. A rotated weight stays rotated."""
    return replace(
        layer, activation_format=None, activation_amax=None, activation_zero_point=0, bias=None, per_token=False
    )


def inputs_of(layer: LayerAssignment, target: ForeignFormat) -> str:
    """How the target's consumer computes the inputs of a quantized layer, in the words of ``ForeignFormat.formats``."""
    how = target.formats[layer.format]
    return PER_ROW if layer.per_token and how == STATIC else how


def why_no_attention(layer: LayerAssignment, target: ForeignFormat) -> str | None:
    """Why an attention's products stay in high precision, or None where they are held, or are not quantized."""
    if layer.attention_amax is None:
        return None
    if not target.attention:
        return f"{target.name} holds no products of attention"
    return target.refuses("attention", layer.activation_format)


def why_not_held(layer: LayerAssignment, target: ForeignFormat) -> str | None:
    """Why a quantized layer stays in high precision, or None."""
    fmt = layer.format
    if fmt not in target.formats:
        return f"{target.name} holds no weights in {fmt}"
    for where, name in {"weights": fmt, "inputs": layer.activation_format}.items():
        if name is not None and (reason := target.refuses(where, name)):
            return reason
    if target.only and not of_those(layer.name, target.only):
        return f"{target.name} leaves such layers in high precision"
    if len(layer.weight_shape) > 2 and fmt not in target.convolutions:
        return f"{target.name} holds no convolutions in {fmt}"
    if layer.weight_shape[1] % target.block:
        return f"{target.name} holds weights whose inputs are a multiple of {target.block}"
    if any(side % target.sides for side in layer.weight_shape):
        return f"{target.name} holds weights whose sides are multiples of {target.sides}"
    if layer.name.endswith(target.excluded.get(fmt, ())):
        return f"{target.name} reads the model's kind off the shape of its weight"
    if layer.rotation and fmt not in target.rotated:
        return f"{target.name} holds no rotated weights in {fmt}; quantize.rotation=0 rotates none"
    if layer.per_token and not target.takes_per_token(fmt):
        return f"{target.name} holds no inputs of {fmt} that are scaled per token; quantize.per_token=false scales none"
    if layer.multiplies and fmt not in target.multiplied:
        return f"{target.name} cannot multiply the inputs of {fmt} by a pre_quant_scale; smoothing=none needs none"
    if layer.activation_zero_point and not target.zero_point and target.formats[fmt] not in OWN_INPUTS:
        return f"{target.name} holds no inputs that are shifted"
    if layer.activation_format != fmt and target.formats[fmt] in (STATIC, IN_BLOCKS):
        found, wanted = layer.activation_format or "high precision", "a scale of the inputs of"
        wanted = wanted if target.formats[fmt] == STATIC else "inputs quantized as weights in"
        return f"{target.name} wants {wanted} {fmt}, and the recipe leaves them in {found}"
    if fmt in target.per_channel and target.per_channel[fmt] != (layer.weight_axis == 0):
        return f"{target.name} holds {'no' if target.per_channel[fmt] else 'only'} one scale for a weight in {fmt}"
    return None
