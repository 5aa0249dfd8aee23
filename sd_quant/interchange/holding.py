"""Adaptation of a run's layer assignments to a format: layers that it cannot store stay in high precision.

A run is refused if no quantized layer is left or one would lose its low-rank branch; the message says what to change.

Some consumers join layers with one input, such as query, key and value. Joined layers get one format and, if that has
one scale per tensor, the largest of their ranges, before anything is quantized. Alternative not taken: rescaling
quantized weights when they are written, which rounds twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.interchange import FP16, OWN_INPUTS, PER_ROW, STATIC, TARGETS, ForeignFormat, Server
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.names.transformers import layout_of, stored_names
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import nvfp4

Assignment = Mapping[str, LayerAssignment]
REASONS = 2  # the commonest, which a refusal gives; of layers the first


def adapted(assignment: Assignment, target: ForeignFormat) -> dict[str, LayerAssignment]:
    """Return the layer assignments as ``target`` can store them, other layers in high precision.

    If only some layers have a low-rank branch, which the target cannot store, these stay in high precision. Raises
    ConfigError if no quantized layer is left, if all quantized linears have such a branch, or if a layer is
    unquantized that the target computes only quantized.
    """
    rows = {name: held(layer, target) for name, layer in assignment.items()}
    plain = [row for row in rows.values() if row.format and row.low_rank is None and len(row.weight_shape) == 2]
    if plain and not target.low_rank:  # of several presets
        reason = f"{target.name} holds no low-rank branch"
        rows = {name: row if row.low_rank is None else not_held(row, reason) for name, row in rows.items()}
    check_quantized(rows, target)  # before those that are joined with it take the blame
    for names in joined_in(rows, target):
        rows |= {row.name: row for row in joined([rows[name] for name in names], target)}
    wanted = [layer for layer in assignment.values() if layer.format is not None]
    kept = [layer for layer in rows.values() if layer.format is not None]
    if not kept:
        found = ", ".join(sorted({layer.format for layer in wanted})) or "nothing"
        reasons = Counter(rows[layer.name].reason for layer in wanted)
        because = f" ({'; '.join(str(reason) for reason, _ in reasons.most_common(REASONS))})" if reasons else ""
        such = f", {listing([layer.name for layer in wanted], REASONS)}" if wanted else ""
        others = Counter(  # that take a layer unchanged, its low-rank branch included
            name
            for name, other in TARGETS.items()
            for layer in wanted
            if why_not_held(layer, other) is None and (layer.low_rank is None or other.low_rank)
        )
        counts = ", ".join(f"{name} holds {count}" for name, count in others.most_common())
        raise ConfigError(
            f"{target.name} holds {', '.join(target.formats)} and none of the layers in {found}{such}{because}; "
            f"hand over {f'to another ({counts}), or ' if counts else ''}a run with another quantize= preset"
        )
    branches = sum(layer.low_rank is not None for layer in kept)
    if branches and not target.low_rank:
        raise ConfigError(
            f"{branches} layers have a low-rank branch, which {target.name} cannot hold; hand over a run with "
            "quantize.rank=0"
        )
    check_quantized(rows, target)
    return rows


def check_quantized(rows: Assignment, target: ForeignFormat) -> None:
    """Raise ConfigError for an unquantized layer that the target computes only quantized."""
    left = [row for name, row in rows.items() if row.format is None and is_quantized_by(target, name)]
    if target.always and left:
        raise ConfigError(
            f"{target.name} computes these layers quantized alone, and {len(left)} are not, such as {left[0].name} "
            f"({left[0].reason}); hand over a run that quantizes all of {', '.join(target.layers)}"
        )


def is_quantized_by(target: ForeignFormat, name: str) -> bool:
    """Return whether the target's consumer quantizes layers of this ``name``."""
    return not target.layers or any(fnmatchcase(name, pattern) for pattern in target.layers)


def held(layer: LayerAssignment, target: ForeignFormat) -> LayerAssignment:
    """Return a layer's assignment as ``target`` stores it: unchanged, without rounded inputs, or unquantized."""
    if layer.role == "attention":
        reason = why_no_attention(layer, target)
        if reason is None:
            return layer
        return replace(layer, activation_format=None, attention_amax=None, key_mean=None, reason=reason)
    if layer.format is None:
        return layer
    if (reason := why_not_held(layer, target)) is not None:
        return not_held(layer, reason)
    return without_inputs(layer) if target.formats[layer.format] in OWN_INPUTS else layer


def not_held(layer: LayerAssignment, reason: str) -> LayerAssignment:
    """Return the assignment in high precision with ``reason``; a layer that is unquantized already is unchanged."""
    if layer.format is None:
        return layer
    smoothing = layer.pre_quant_scale if layer.folded_into else None  # as the layer in front multiplies by it
    return replace(
        without_inputs(layer), format=None, reason=reason, weight_amax=None, weight_axis=None, rounded=None,
        low_rank=None, pre_quant_scale=smoothing, rotation=0,
    )  # fmt: skip


def without_inputs(layer: LayerAssignment) -> LayerAssignment:
    """Return the assignment with inputs in high precision. A rotated weight stays rotated."""
    return replace(
        layer, activation_format=None, activation_amax=None, activation_zero_point=0, bias=None, per_token=False
    )


def inputs_of(layer: LayerAssignment, target: ForeignFormat) -> str:
    """Return how the target's consumer computes a quantized layer's inputs, in words of ``ForeignFormat``."""
    how = target.formats[layer.format]
    if layer.activation_format is None and layer.format in target.weights_alone:
        return FP16
    return PER_ROW if layer.per_token and how == STATIC else how


def why_no_attention(layer: LayerAssignment, target: ForeignFormat) -> str | None:
    """Return why ``target`` cannot store an attention layer's quantized products; None if it can, or without these."""
    if layer.attention_amax is None:
        return None
    if not target.attention:
        return f"{target.name} holds no products of attention"
    return target.refuses("attention", layer.activation_format)


def why_not_held(layer: LayerAssignment, target: ForeignFormat) -> str | None:
    """Return why ``target`` cannot store a quantized layer, which then stays in high precision; None if it can."""
    fmt = layer.format
    if fmt not in target.formats:
        return f"{target.name} holds no weights in {fmt}"
    if not is_quantized_by(target, layer.name):
        return f"{target.consumer} leaves such layers in high precision"
    for where, name in {"weights": fmt, "inputs": layer.activation_format}.items():
        if name is not None and (reason := target.refuses(where, name)):
            return reason
    if len(layer.weight_shape) > 2 and fmt not in target.convolutions:
        return f"{target.name} holds no convolutions in {fmt}"
    if layer.weight_shape[1] % target.block:
        return f"{target.name} holds weights whose inputs are a multiple of {target.block}"
    multiple = target.multiples.get(fmt, 1)
    if any(side % multiple for side in layer.weight_shape[:2]):
        return f"{target.name} holds weights in {fmt} whose sides are multiples of {multiple}"
    if any(fnmatchcase(layer.name, pattern) for pattern in target.excluded.get(fmt, ())):
        return f"{target.name} reads the model's kind off the shape of its weight"
    if layer.rotation and fmt not in target.rotated:
        return f"{target.name} holds no rotated weights in {fmt}; quantize.rotation=0 rotates none"
    if fmt in target.always_rotated and not layer.rotation:
        return f"{target.consumer} rotates the inputs of {fmt} always; quantize.rotation=256 does"
    if layer.per_token and not target.takes_per_token(fmt):
        return f"{target.name} holds no inputs of {fmt} that are scaled per token; quantize.per_token=false scales none"
    if layer.multiplies and fmt not in target.multiplied:
        return f"{target.name} cannot multiply the inputs of {fmt} by a pre_quant_scale; smoothing=none needs none"
    if layer.activation_zero_point and not target.zero_point and target.formats[fmt] not in OWN_INPUTS:
        return f"{target.name} holds no inputs that are shifted"
    if not target.takes_inputs(fmt, layer.activation_format):
        wanted = "a scale of the inputs of" if target.formats[fmt] == STATIC else "inputs quantized in"
        found = layer.activation_format or "high precision"
        return f"{target.name} wants {wanted} {target.inputs_in.get(fmt, fmt)}, and the recipe leaves them in {found}"
    if not target.takes_scales(fmt, layer.weight_axis == 0, layer.per_token):
        return f"{target.name} holds {'no' if target.per_channel[fmt] else 'only'} one scale for a weight in {fmt}"
    return None


# Layers that a consumer joins


def joined_in(names: Assignment, target: ForeignFormat) -> Iterator[Sequence[str]]:
    """Yield the layer names of each group that the target stores or computes as one layer."""
    if target.joined:
        yield from stored_names(names, layout_of(names)).values()
    for _, _, group in groups_of(names, target.fused):
        yield group


def groups_of(names: Iterable[str], fused: Iterable[Sequence[str]]) -> Iterator[tuple[str, Sequence[str], list[str]]]:
    """Yield prefix, suffixes and existing names of each group of layers whose names differ by suffixes in ``fused``."""
    known = dict.fromkeys(names)
    for ends in fused:
        for begin in dict.fromkeys(
            name.removesuffix(end) for name in known for end in ends if name.endswith(f".{end}")
        ):
            yield begin, ends, [begin + end for end in ends if begin + end in known]


def joined(rows: Sequence[LayerAssignment], target: ForeignFormat) -> Sequence[LayerAssignment]:
    """Return the assignments ``rows`` of layers that the target joins: with common ranges, or all unquantized."""
    kept = [row for row in rows if row.format is not None]
    if len(rows) == 1 or not kept:
        return rows
    first = kept[0]
    if len({(row.format, row.activation_format, row.rotation, row.per_token) for row in rows}) > 1:
        return [not_held(row, f"{target.name} joins it with layers in other formats") for row in rows]
    if not all(same(*(each.pre_quant_scale if each.multiplies else None for each in (row, first))) for row in rows):
        reason = f"{target.name} joins it with layers whose inputs are multiplied by another vector"
        return [not_held(row, f"{reason}; smoothing=folded has one for all") for row in rows]
    if target.joined and first.activation_amax is not None:
        largest = max(row.activation_amax for row in rows)
        rows = [replace(row, activation_amax=largest) for row in rows]
    if first.format not in target.one_range or first.weight_axis == 0:
        return rows
    readers = [[each for each in rows if each.activation_amax == row.activation_amax] for row in rows]  # of one tensor
    ranges = [torch.stack([each.weight_amax.max() for each in group]).max().reshape(1) for group in readers]
    return list(map(with_range, rows, ranges))


def same(vector: Tensor | None, other: Tensor | None) -> bool:
    return vector is other or (vector is not None and other is not None and torch.equal(vector, other))


def with_range(row: LayerAssignment, amax: Tensor) -> LayerAssignment:
    """Return the assignment with a wider range ``amax`` [1]. NVFP4 codes stay; scales are rounded again."""
    if row.rounded is None or torch.equal(row.weight_amax, amax):
        return replace(row, weight_amax=amax)
    codes, scale, common = row.rounded
    return replace(row, weight_amax=amax, rounded=(codes, *nvfp4.rebased(scale, common, nvfp4.global_scale(amax))))


def check_bf16(target: ForeignFormat, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a network in bf16 that the target stores in fp16: the denoiser, or any exported graph."""
    if target.bf16 is True:
        return
    parts, networks = checkpoint.parts(), checkpoint.family.NETWORKS
    holds = bool(target.bf16) and networks[parts[checkpoint.family.DENOISER].component] in target.bf16
    held = parts if target.runtime else [checkpoint.family.DENOISER]
    in_bf16 = [name for name in held if parts[name].contract.weights == torch.bfloat16]
    if in_bf16 and not holds:
        able = ", ".join(name for name, other in TARGETS.items() if other.bf16 is True)
        raise ConfigError(
            f"export.dtype has {' and '.join(in_bf16)} in bf16, expected fp16 with hand_over={target.name}, which "
            f"has no bf16; {able} have"
        )


# Servers, by rules of the sources of the versions in ``Server``


def servers_of(
    target: ForeignFormat, checkpoint: Checkpoint, rows: Assignment, others: Mapping[str, Assignment] = {}
) -> dict[str, str | None]:
    """Return the target's servers by name, each with why it does not load the denoiser's assignment ``rows``, or None.

    ``others`` are the layer assignments of other networks by component.
    """
    return {name: why_not_served(server, checkpoint, rows, others) for name, server in target.servers.items()}


def why_not_served(
    server: Server, checkpoint: Checkpoint, rows: Assignment, other_rows: Mapping[str, Assignment] = {}
) -> str | None:
    """Return why a server does not load a denoiser with the layer assignments ``rows``; None if it does."""
    networks, pipelines = checkpoint.family.NETWORKS, checkpoint.family.PIPELINES
    denoiser = denoiser_part(checkpoint).component
    if not server.pipelines & set(pipelines):
        return f"it loads no quantized {pipelines[0]}"
    others = [name for name, kind in networks.items() if kind == networks[denoiser] and name != denoiser]
    others = [name for name in others if formats_in(other_rows.get(name, {})) != formats_in(rows) or not rows]
    if others and server.one_config:
        return f"it takes {', '.join(others)} for quantized too, as the {denoiser} is"
    quantized = {name: layer.format for name, layer in rows.items() if layer.format is not None}
    if len(formats := set(quantized.values())) > 1 and not server.mixed:
        return f"it loads one format, and this has {' and '.join(sorted(formats))}"
    if not server.per_token and any(rows[name].per_token for name in quantized):
        return f"it loads no {' or '.join(sorted(formats))} whose inputs are scaled per token"
    found: dict[str, str] = {}
    for pattern in [pattern for pipeline in pipelines for pattern in server.plain.get(pipeline, ())]:
        found |= {name: pattern for name in quantized if fnmatchcase(name, pattern)}
    if found:
        return (
            f"it takes {len(found)} quantized layers for unquantized ({listing(list(found), 2)}); "
            f"quantize.exclude with {' and '.join(dict.fromkeys(found.values()))} keeps them in fp16"
        )
    return None


def formats_in(rows: Assignment) -> dict[str, tuple]:
    """Return the weight and input formats of the quantized layers by name."""
    return {name: (layer.format, layer.activation_format) for name, layer in rows.items() if layer.format is not None}


def check_served(target: ForeignFormat, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a pipeline that none of the target's servers loads quantized."""
    refusals = servers_of(target, checkpoint, {})
    if refusals and all(refusals.values()):
        able = ", ".join(name for name, other in TARGETS.items() if not other.servers and other.families is None)
        told = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ConfigError(f"{target.name} is for servers, and none loads this pipeline ({told}); hand over to {able}")
