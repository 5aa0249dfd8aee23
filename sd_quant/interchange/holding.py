"""Adapts an assignment to the layers that a foreign format can hold.

A layer that it cannot hold stays in high precision, with the reason. A recipe is refused if that leaves no layer, or if
some would lose their branch; the message names a recipe that fits. Layers that a consumer computes at once are held
together or not at all, with one global scale where their format has one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.interchange import OWN_INPUTS, PER_ROW, STATIC, TARGETS, ForeignFormat, Server
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

REASONS = 2  # the commonest, which a refusal gives


def adapted(assignment: Mapping[str, LayerAssignment], target: ForeignFormat) -> dict[str, LayerAssignment]:
    """The rows of ``assignment`` as ``target`` holds them.

    Raises ConfigError when it holds none of the quantized layers, or they have a branch that it cannot hold.
    """
    rows = together({name: held(layer, target) for name, layer in assignment.items()}, target)
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
    return rows


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
        return in_high_precision(layer, reason)
    return without_inputs(layer) if target.formats[layer.format] in OWN_INPUTS else layer


def in_high_precision(layer: LayerAssignment, reason: str) -> LayerAssignment:
    """The row without quantization; its weight stays divided where the layer in front multiplies."""
    return replace(
        without_inputs(layer), format=None, reason=reason, weight_amax=None, weight_axis=None, rounded=None,
        low_rank=None, pre_quant_scale=layer.pre_quant_scale if layer.folded_into else None, rotation=0,
    )  # fmt: skip


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
    if len(layer.weight_shape) > 2 and fmt not in target.convolutions:
        return f"{target.name} holds no convolutions in {fmt}"
    if layer.weight_shape[1] % target.block:
        return f"{target.name} holds weights whose inputs are a multiple of {target.block}"
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
    if layer.activation_format != fmt and target.formats[fmt] == STATIC:
        found = layer.activation_format or "high precision"
        return f"{target.name} wants a scale of the inputs of {fmt}, and the recipe leaves them in {found}"
    if fmt in target.per_channel and target.per_channel[fmt] != (layer.weight_axis == 0):
        return f"{target.name} holds {'no' if target.per_channel[fmt] else 'only'} one scale for a weight in {fmt}"
    return None


# Layers that a consumer computes at once


def groups_of(names: Iterable[str], fused: Iterable[Sequence[str]]) -> Iterator[tuple[str, Sequence[str], list[str]]]:
    """The groups of layers that ``fused`` joins: what their names begin with, the ends, and those that there are."""
    known = dict.fromkeys(names)
    for ends in fused:
        for begin in dict.fromkeys(
            name.removesuffix(end) for name in known for end in ends if name.endswith(f".{end}")
        ):
            yield begin, ends, [begin + end for end in ends if begin + end in known]


def together(rows: Mapping[str, LayerAssignment], target: ForeignFormat) -> dict[str, LayerAssignment]:
    """``rows`` whose groups of ``target.fused`` have one format each, or none, and one global scale."""
    found = dict(rows)
    for _, _, names in groups_of(rows, target.fused):
        kinds = {(rows[name].format, rows[name].activation_format) for name in names}
        if len(kinds) == 1:
            found |= with_one_scale([rows[name] for name in names])
            continue
        for name in names:
            if rows[name].format is not None:
                others = ", ".join(
                    f"{other.rpartition('.')[2]} in {rows[other].format or 'high precision'}"
                    for other in names if other != name
                )  # fmt: skip
                found[name] = in_high_precision(rows[name], f"{target.name} holds it in one format with {others}")
    return found


def with_one_scale(layers: Sequence[LayerAssignment]) -> dict[str, LayerAssignment]:
    """Those of ``layers`` that read one tensor, and so have one range of inputs, with the largest range of weights.

    It makes one global scale of the weights; layers without one stay. Chosen codes stay too, and their blocks' scales
    become the nearest in steps of the new global scale.
    """
    found = {}
    for layer in layers:
        fmt = layer.format and FORMATS[layer.format]
        if not fmt or len(fmt.onnx_scale_types) == 1:
            continue
        amax = max(
            (each.weight_amax for each in layers if each.activation_amax == layer.activation_amax),
            key=lambda amax: amax.max().item(),
        )
        rounded = layer.rounded
        if rounded is not None and not amax.equal(layer.weight_amax):
            codes, scales, before = rounded
            rounded = (codes, *fmt.arithmetic.with_global_scale(scales, before, amax))
        found[layer.name] = replace(layer, weight_amax=amax, rounded=rounded)
    return found


# Servers


def servers_of(
    target: ForeignFormat, checkpoint: Checkpoint, rows: Mapping[str, LayerAssignment]
) -> dict[str, str | None]:
    """The target's servers by name: None for those that load ``rows`` of the checkpoint's denoiser, else why not."""
    return {name: why_not_served(server, checkpoint, rows) for name, server in target.servers.items()}


def why_not_served(server: Server, checkpoint: Checkpoint, rows: Mapping[str, LayerAssignment]) -> str | None:
    """Why a server does not load ``rows``, or None."""
    networks, pipelines = checkpoint.family.NETWORKS, checkpoint.family.PIPELINES
    denoiser = denoiser_part(checkpoint).component
    if not server.pipelines & set(pipelines):
        return f"it loads no quantized {pipelines[0]}"
    others = [name for name, kind in networks.items() if kind == networks[denoiser] and name != denoiser]
    if others and server.one_config:
        return f"it takes {', '.join(others)} for quantized too"
    quantized = {name: layer.format for name, layer in rows.items() if layer.format is not None}
    if len(formats := set(quantized.values())) > 1 and not server.mixed:
        return f"it loads one format, and this has {' and '.join(sorted(formats))}"
    found: dict[str, str] = {}
    for pattern in [pattern for pipeline in pipelines for pattern in server.plain.get(pipeline, ())]:
        found |= {name: pattern for name in quantized if fnmatchcase(name, pattern)}
    if found:
        return (
            f"on one GPU it takes {len(found)} quantized layers for unquantized ({listing(list(found), 2)}); "
            f"quantize.exclude with {' and '.join(dict.fromkeys(found.values()))} keeps them in fp16"
        )
    return None


def check_served(target: ForeignFormat, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a pipeline that none of the target's servers loads quantized."""
    refusals = servers_of(target, checkpoint, {})
    if refusals and all(refusals.values()):
        able = ", ".join(name for name, other in TARGETS.items() if not other.servers and other.families is None)
        told = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ConfigError(f"{target.name} is for servers, and none loads this pipeline ({told}); hand over to {able}")
