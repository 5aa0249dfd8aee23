"""LoRAs added at run time to a third-party quantized network, for a layer's input x:

    y = layer(x) + (x down^T) up^T

The second product is not rounded; ``down`` is divided by the layer's smoothing factors. LoRAs of unquantized weights
are fused. Whether a checkpoint has a LoRA fused already is measured: the projection of (its weights - weights without
the LoRA) on the LoRA's delta is near 1 if fused and near 0 if not, as rounding errors are almost orthogonal to the
delta. Alternative not taken: a knob, which would have to be right for each candidate.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from sd_quant.checkpoints.lora import AdaptedTensor, adapted_in, factors_of
from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, lazy
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.errors import plain_weight
from sd_quant.interchange.inputs import multipliers_of
from sd_quant.models.checkpoint import Checkpoint, denoiser_part

FUSED, BESIDE = "fused", "beside"  # where a candidate has the model's LoRAs
NAMED = 3  # layers that a refusal names
WITHIN = 0.25  # of 0 or 1: how near the share of the LoRA in a checkpoint's weights has to be


def adapted_of(checkpoint: Checkpoint) -> dict[str, AdaptedTensor]:
    """Return the denoiser's weights that the checkpoint's LoRAs change, by layer name."""
    return adapted_in(checkpoint, denoiser_part(checkpoint).component)


def holds_loras(denoiser: QuantizedDenoiser, plain: Mapping[str, QuantizedLayer], checkpoint: Checkpoint) -> bool:
    """Return whether the LoRAs of ``checkpoint`` are fused into the weights of ``denoiser``.

    ``plain`` has its layers, from ``unfolded``. Raises ConfigError for a LoRA strength that is near neither 0 nor 1.
    """
    product = size = 0.0
    for name, each in adapted_of(checkpoint).items():
        if len(each.shape) == 1:  # a norm or a bias, which smoothing may have scaled
            continue
        without = each.source.read().float()
        held = plain_weight(plain[name]) if name in plain else denoiser.parameters[f"{name}.weight"].read().float()
        delta = each.read() - without
        product += float(((held - without) * delta).sum(dtype=torch.float64))
        size += float(delta.square().sum(dtype=torch.float64))
    share = product / size if size else 0.0
    if min(abs(share), abs(share - 1)) > WITHIN:
        raise ConfigError(
            f"the weights of the candidate {denoiser.path} have {share:.2f} times what model.loras add; expected 1, "
            "fused before quantization, or 0, without them; give model.loras the files and strengths that it has"
        )
    return share > 0.5


def with_loras(
    denoiser: QuantizedDenoiser, plain: Mapping[str, QuantizedLayer], checkpoint: Checkpoint
) -> QuantizedDenoiser:
    """Return ``denoiser`` with the LoRAs of ``checkpoint``, and without ``runtime``, which would compute without LoRAs.

    ``plain`` has its layers, from ``unfolded``. Raises ConfigError for a LoRA of a norm, of a convolution with rounded
    inputs, or of a layer with smoothing folded into the preceding module, because its input differs from the LoRA's.
    """
    adapted = adapted_of(checkpoint)
    quantized = [name for name in adapted if name in denoiser.layers]
    refused = {
        "are norms or biases": [name for name in adapted if len(adapted[name].shape) == 1],
        "are convolutions that round their inputs": [
            name for name in quantized if len(adapted[name].shape) != 2 and denoiser.layers[name].inputs is not None
        ],
        "have a smoothing that the modules in front compute, so that a LoRA does not fit their inputs": [
            name for name in quantized if plain[name] is not denoiser.layers[name]
        ],
    }
    for what, names in refused.items():
        if names:
            raise ConfigError(
                f"model.loras cannot be added to the candidate {denoiser.path} at run time: layers {what} "
                f"({len(names)}: {listing(names, NAMED)}); give a candidate with these in its weights, or none of them"
            )
    layers = {name: layer_with(denoiser.layers[name], adapted[name]) for name in quantized}
    fused = {f"{name}.weight": each for name, each in adapted.items() if name not in denoiser.layers}
    parameters = {name: AdaptedTensor(denoiser.parameters[name], each.updates) for name, each in fused.items()}
    return replace(
        denoiser, layers={**denoiser.layers, **layers}, parameters={**denoiser.parameters, **parameters}, runtime=None
    )


def layer_with(layer: QuantizedLayer, adapted: AdaptedTensor) -> QuantizedLayer:
    """Return ``layer`` with the LoRA of ``adapted`` in its weight, and as a low-rank branch if inputs are rounded."""
    if layer.inputs is None:
        return replace(layer, weight=AdaptedTensor(layer.weight, adapted.updates))
    up, down = factors_of(adapted)
    down = down / prod(multipliers_of(layer.inputs), start=torch.ones(()))
    branch = (lazy(up), lazy(down))
    if layer.branch is not None:
        ours, theirs = branch, layer.branch
        branch = (beside(theirs[0], ours[0], 1), beside(theirs[1], ours[1], 0))
    source = layer.weight
    weight = LazyTensor(tuple(source.shape), torch.float32, lambda: source.read().float() + up @ down)
    return replace(layer, weight=weight, branch=branch)


def beside(first, second, axis: int) -> LazyTensor:
    """Concatenate two low-rank factors along ``axis``, the axis of their ranks."""
    return lazy(torch.cat([first.read().float(), second.read()], axis))
