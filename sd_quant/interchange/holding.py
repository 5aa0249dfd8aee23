"""The assignment that a target holds, of the one that a recipe has made, and what its consumer computes of it.

A layer that the target cannot hold stays in high precision, with its reason. Where that leaves no layer, or some would
lose their branch, the recipe is refused: another fits, and the sentence names it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor, nn

from sd_quant.errors import ConfigError
from sd_quant.interchange import OWN_INPUTS, PER_ROW, STATIC, ForeignFormat
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1, nvfp4
from sd_quant.quantization.formats.blocks import spread
from sd_quant.simulation.modelopt import simulate

REASONS = 2  # that a refusal gives, the commonest


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
    return rows


def held(layer: LayerAssignment, target: ForeignFormat) -> LayerAssignment:
    """One row: as it is, with other inputs, or in high precision with the reason."""
    if layer.role == "attention":
        reason = why_no_attention(layer, target)
        if reason is None:
            return layer
        return replace(layer, activation_format=None, attention_amax=None, key_mean=None, reason=reason)
    if layer.format is None:
        return layer
    if (reason := why_not_held(layer, target)) is not None:
        smoothing = layer.pre_quant_scale if layer.folded_into else None  # what a norm has taken over stays divided
        return replace(
            without_inputs(layer), format=None, reason=reason, weight_amax=None, weight_axis=None, rounded=None,
            low_rank=None, pre_quant_scale=smoothing, rotation=0,
        )  # fmt: skip
    return without_inputs(layer) if target.formats[layer.format] in OWN_INPUTS else layer


def without_inputs(layer: LayerAssignment) -> LayerAssignment:
    """With inputs in high precision. A weight whose codes are those of the rotated one stays that."""
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


def fake_quantize_per_row(x: Tensor, quantizer) -> Tensor:
    """ModelOpt's backend for inputs that are quantized row by row as they come."""
    return quantizer.backend_extra_args["rounded"](x)


def quantize_per_row(layer: nn.Module, row: LayerAssignment, target: ForeignFormat) -> None:
    """Have a simulated linear quantize its input, behind a ``pre_quant_scale``, as the target's consumer does."""
    from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend

    if not is_registered_quant_backend(fake_quantize_per_row.__name__):
        register_quant_backend(fake_quantize_per_row.__name__, fake_quantize_per_row)
    quantizer = layer.input_quantizer
    quantizer.backend = fake_quantize_per_row.__name__
    quantizer.backend_extra_args = {
        "rounded": import_module(f"sd_quant.interchange.write_{target.name}").per_row(row.rotation)
    }
    quantizer.enable()


def multiply_scales_in_fp32(layer: nn.Module, row: LayerAssignment) -> None:
    """Have a simulated linear in NVFP4 multiply a block's scale and the global one in fp32, and not in fp16 as a graph.

    Codes of the weight stay what the file holds; those of inputs follow.
    """
    from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend

    if not is_registered_quant_backend(fake_quantize_in_fp32.__name__):
        register_quant_backend(fake_quantize_in_fp32.__name__, fake_quantize_in_fp32)
    weight = layer.get_parameter("weight")
    codes, (scale, global_scale) = row.codes_and_scales(weight)
    weight.copy_(e2m1.decode(codes) * spread(scale * global_scale, codes.shape[-1]))
    layer.weight_quantizer.disable()
    layer.input_quantizer.backend = fake_quantize_in_fp32.__name__


def fake_quantize_in_fp32(x: Tensor, quantizer) -> Tensor:
    """ModelOpt's backend for it."""
    scale, global_scale = nvfp4.scales(x, quantizer.amax.float())
    product = spread(scale * global_scale, x.shape[-1])
    return (e2m1.decode(e2m1.encode(x.float() / product)) * product).to(x)


@torch.no_grad()
def simulate_target(module: nn.Module, rows: Mapping[str, LayerAssignment], target: ForeignFormat) -> nn.Module:
    """Make of ``module``, in place, what the consumer computes of the ``rows`` that ``adapted`` has made.

    Weights that are not quantized are fp16's numbers, as in every target's file, and static codes are the file's: a
    weight in the middle of two would get the other one from ModelOpt, which multiplies by 1 / scale.
    """
    stored = module.state_dict()
    for name, buffer in module.named_buffers():  # such as SD3's positions; quantizers bring their own below
        if name in stored and buffer.is_floating_point():
            buffer.copy_(buffer.half())
    module = simulate(module, rows)
    quantized = {f"{row.name}.weight": row for row in rows.values() if row.format is not None}
    for name, parameter in module.named_parameters():
        if name not in quantized:
            parameter.copy_(parameter.half())
    for row in quantized.values():
        layer = module.get_submodule(row.name)
        if FORMATS[row.format].static_scale:
            weight = layer.get_parameter("weight")
            weight.copy_(row.rounded_weight(weight))
        if inputs_of(row, target) == PER_ROW:
            quantize_per_row(layer, row, target)
        if row.format in target.in_fp32:
            multiply_scales_in_fp32(layer, row)
        if target.half:
            for buffer in (*layer.weight_quantizer.buffers(), *layer.input_quantizer.buffers()):
                buffer.copy_(buffer.half())
    return module
