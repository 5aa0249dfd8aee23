"""Undo smoothing that is folded into the module in front of a layer, to judge the layer alone.

SmoothQuant divides a weight's columns by factors and multiplies the layer's input, or folds the factors into the
outputs of the norm or linear in front; then the full-precision network's inputs do not fit the layer. The factors are
estimated from the module in front: for a norm the ratio of its weights, for a linear the least-squares factor of each
row, once its own columns are restored. A modulation has two rows and two biases for each channel, a shift's and a
scale's. No format says what was folded.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.files.tensors import LazyTensor
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.inputs import Multiplied, multipliers_of
from sd_quant.models.checkpoint import Checkpoint, denoiser_weights, empty_denoiser
from sd_quant.models.parts import SharedInput

# Least distances of a factor from 1: E5M2 rounds a norm's weight by up to 0.125, and two bits may shorten a row by a
# third. Where a norm has a large one, slight ones count too.
OF_NORM, OF_ROW = 0.15, 0.5
SLIGHT_OF_NORM, SLIGHT_OF_ROW = 0.01, 0.05


def unfolded(denoiser: QuantizedDenoiser, checkpoint: Checkpoint) -> Mapping[str, QuantizedLayer]:
    """The layers for inputs of the full-precision network: unchanged without folded smoothing.

    Reads the weights of the norms and linears in front.
    """
    full, factors_in, factors_out = denoiser_weights(checkpoint), dict[str, Tensor](), dict[str, Tensor]()
    linears = [
        name for name, role in checkpoint.family.layer_roles(empty_denoiser(checkpoint)).items() if role != "conv"
    ]
    shared = [each for each in checkpoint.family.shared_inputs(linears) if each.producer is not None]
    norms = [each for each in shared if len(full[f"{each.producer}.weight"].shape) == 1]
    by_norms = {each: quotient(weight_in(denoiser, each.producer), full[f"{each.producer}.weight"].float())
                for each in norms}  # fmt: skip
    folds = any(noticed(factor, OF_NORM) for factor in by_norms.values())
    for each, factor in by_norms.items():
        if folds and noticed(factor, SLIGHT_OF_NORM):
            factors_in |= dict.fromkeys(each.readers, factor)
    for each in shared:
        if each not in norms:
            ours, theirs = full[f"{each.producer}.weight"].float(), weight_in(denoiser, each.producer)
            restored = theirs * factors_in.get(each.producer, torch.ones(()))
            inputs = full[f"{each.readers[0]}.weight"].shape[1]
            bias, their_bias = None, None
            if each.modulation is not None and f"{each.producer}.bias" in full:
                bias, their_bias = full[f"{each.producer}.bias"], denoiser.parameters[f"{each.producer}.bias"].read()
            found, own = numbers_of(each, restored, their_bias, inputs), numbers_of(each, ours, bias, inputs)
            factor = quotient((found * own).sum(1), own.square().sum(1))  # of each row, by least squares
            if noticed(factor, SLIGHT_OF_ROW if folds else OF_ROW):
                factors_in |= dict.fromkeys(each.readers, factor)
                absorbed = factors_out.setdefault(each.producer, torch.ones(len(ours)))
                for rows in each.rows(inputs):
                    absorbed[rows] *= factor
    return {
        name: without(layer, factors_in.get(name), factors_out.get(name)) for name, layer in denoiser.layers.items()
    }


def weight_in(denoiser: QuantizedDenoiser, name: str) -> Tensor:
    """A weight for inputs that are not multiplied."""
    layer = denoiser.layers.get(name)
    return denoiser.parameters[f"{name}.weight"].read().float() if layer is None else plain_weight(layer)


def noticed(factor: Tensor, least: float) -> bool:
    return bool((factor - 1).abs().max() > least)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """``a`` by ``b``, and 1 where ``b`` is zero."""
    return torch.where(b == 0, 1.0, a / b)


def numbers_of(shared: SharedInput, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Numbers of a producer, a linear, that smoothing factors multiply: [width, numbers].

    Those of a modulation, which has a ``bias``, are both rows, the shift's bias, and 1 plus the scale's bias.
    """
    found = [weight[rows] for rows in shared.rows(width)]
    if bias is not None:
        shift, scale = (bias.float()[rows, None] for rows in shared.rows(width))
        found += [shift, scale + 1]
    return torch.cat(found, 1)


def without(layer: QuantizedLayer, factor_in: Tensor | None, factor_out: Tensor | None) -> QuantizedLayer:
    """``layer`` for inputs without ``factor_in`` and with outputs without ``factor_out``."""
    if factor_out is not None:
        source, divisor = layer.weight, factor_out[:, None]
        weight = LazyTensor(tuple(source.shape), torch.float32, lambda: source.read().float() / divisor)
        layer = replace(layer, weight=weight)
    return layer if factor_in is None else replace(layer, inputs=Multiplied(factor_in, False, layer.inputs))


def plain_weight(layer: QuantizedLayer) -> Tensor:
    """The weight for inputs that are not multiplied: its columns times the factors of the inputs."""
    weight = layer.weight.read().float()
    for factor in multipliers_of(layer.inputs):
        weight = weight * factor.view(1, -1, *(1,) * (weight.ndim - 2))
    return weight
