"""Errors of a quantized layer: of its own output, and of the network's output with this layer alone quantized.

Both are measured on inputs of the unchanged full-precision network, with one weight in memory at a time. Alternative
not taken: comparing two whole networks layer by layer, which counts earlier errors as a layer's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.files.tensors import LazyTensor
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, quantize_inputs
from sd_quant.interchange.inputs import Multiplied, multipliers_of, smoothed
from sd_quant.models.checkpoint import Checkpoint, denoiser_weights, empty_denoiser
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import finite, relative_error


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer, relative to the norms of the full-precision layer's; None where such a norm is zero."""

    weight: float | None
    output: float | None


def product(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the linear or convolution ``module`` on ``x`` with ``weight`` for its own, without the bias."""
    if isinstance(module, nn.Conv2d):
        return F.conv2d(x, weight, None, module.stride, module.padding, module.dilation, module.groups)
    return F.linear(x, weight)


def theirs(module: nn.Module, layer: QuantizedLayer, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the quantized ``layer`` on ``x``, without the bias: rounded inputs, its ``weight`` and its branch."""
    if layer.inputs is None:
        return product(module, x, weight)
    rounded = layer.inputs(x)
    output = product(module, rounded, weight)
    if layer.branch is None:
        return output
    up, down = (each.read().to(weight) for each in layer.branch)
    return output + F.linear(F.linear(smoothed(layer.inputs, x) - rounded, down), up)


@torch.no_grad()
def layer_errors(
    network: nn.Module,
    layers: Mapping[str, QuantizedLayer],
    run: Callable[[], object],
    advance: Callable[[], object] = lambda: None,
) -> dict[str, LayerErrors]:
    """Measure the errors of ``layers`` on the inputs that each has in ``network`` while ``run()`` calls it.

    ``advance`` is called after every call of a layer.
    """
    squares = {name: torch.zeros(2, dtype=torch.float64) for name in layers}  # of the error and of the output
    weights: dict[str, float | None] = {}

    def hook(name: str):
        layer = layers[name]

        def measure(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            (x, *_), full = arguments, module.get_parameter("weight")
            weight = layer.weight.read().to(full)
            if name not in weights:
                weights[name] = relative_error(full.cpu(), plain_weight(layer))
            expected = product(module, x, full)
            error = theirs(module, layer, x, weight) - expected
            squares[name] += torch.stack([error.double().square().sum(), expected.double().square().sum()]).cpu()
            advance()

        return measure

    handles = [network.get_submodule(name).register_forward_hook(hook(name)) for name in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    sums = {name: each.tolist() for name, each in squares.items()}
    return {
        name: LayerErrors(weights.get(name), finite((error / reference) ** 0.5) if reference else None)
        for name, (error, reference) in sums.items()
    }


@contextmanager
def put_in(network: nn.Module, name: str, layer: QuantizedLayer) -> Iterator[None]:
    """Within the context, replace the layer ``name`` of the full-precision ``network`` by the quantized ``layer``."""
    module = network.get_submodule(name)
    weight = module.get_parameter("weight")
    full = weight.data
    weight.data = layer.weight.read().to(full)
    handles = [] if layer.inputs is None else quantize_inputs(module, layer.inputs, layer.branch)
    try:
        yield
    finally:
        weight.data = full
        for handle in handles:
            handle.remove()


@torch.no_grad()
def alone(
    network: nn.Module,
    layers: Mapping[str, QuantizedLayer],
    names: Sequence[str],
    run: Callable[[], Tensor],
    advance: Callable[[], object] = lambda: None,
) -> dict[str, float | None]:
    """Return the relative error of ``run()`` with each layer of ``names`` quantized alone, by name, largest first."""
    expected, errors = run(), {}
    for name in names:
        with put_in(network, name, layers[name]):
            errors[name] = relative_error(expected, run())
        advance()
    return dict(sorted(errors.items(), key=lambda item: -(item[1] or 0)))


# Smoothing that is folded into the module in front of a layer, which is undone to judge the layer alone. SmoothQuant
# divides a weight's columns by factors and multiplies the layer's input, or folds the factors into the outputs of the
# norm or linear in front; then the full-precision network's inputs do not fit the layer. The factors are estimated: for
# a norm as the ratio of its weights, for a linear as the least-squares factor of each row, once its own columns are
# restored. A modulation has two rows and two biases for each channel, a shift's and a scale's. No format says what was
# folded.

# Least distances of a factor from 1: E5M2 rounds a norm's weight by up to 0.125, and two bits may shorten a row by a
# third. Where a norm has a large one, slight ones count too.
OF_NORM, OF_ROW = 0.15, 0.5
SLIGHT_OF_NORM, SLIGHT_OF_ROW = 0.01, 0.05


def unfolded(denoiser: QuantizedDenoiser, checkpoint: Checkpoint) -> Mapping[str, QuantizedLayer]:
    """Return the layers for inputs of the full-precision network: smoothing folded into preceding modules is undone.

    Smoothing factors are estimated from norms and linears in front; a layer without folded smoothing is unchanged.
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
    """Return the weight of a layer, fp32, for inputs without smoothing factors."""
    layer = denoiser.layers.get(name)
    return denoiser.parameters[f"{name}.weight"].read().float() if layer is None else plain_weight(layer)


def noticed(factor: Tensor, least: float) -> bool:
    return bool((factor - 1).abs().max() > least)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, and 1 where ``b`` is zero."""
    return torch.where(b == 0, 1.0, a / b)


def numbers_of(shared: SharedInput, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Return the numbers of a linear that smoothing folded into it multiplies, [width, numbers]: a row per channel.

    Of a modulation (with a ``bias``) these are rows of shift and scale, the shift's bias, and 1 + the scale's bias.
    """
    found = [weight[rows] for rows in shared.rows(width)]
    if bias is not None:
        shift, scale = (bias.float()[rows, None] for rows in shared.rows(width))
        found += [shift, scale + 1]
    return torch.cat(found, 1)


def without(layer: QuantizedLayer, factor_in: Tensor | None, factor_out: Tensor | None) -> QuantizedLayer:
    """Return ``layer`` with inputs multiplied by ``factor_in`` and outputs divided by ``factor_out``, where given."""
    if factor_out is not None:
        source, divisor = layer.weight, factor_out[:, None]
        weight = LazyTensor(tuple(source.shape), torch.float32, lambda: source.read().float() / divisor)
        layer = replace(layer, weight=weight)
    return layer if factor_in is None else replace(layer, inputs=Multiplied(factor_in, False, layer.inputs))


def plain_weight(layer: QuantizedLayer) -> Tensor:
    """Return the weight for inputs without smoothing factors: its columns times these factors."""
    weight = layer.weight.read().float()
    for factor in multipliers_of(layer.inputs):
        weight = weight * factor.view(1, -1, *(1,) * (weight.ndim - 2))
    return weight
