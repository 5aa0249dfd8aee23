"""Errors of a quantized layer: of its own output, and of the network's output with this layer alone quantized.

Both are for inputs of the unchanged full-precision network, with one weight in memory at a time. The road not taken is
to compare two whole networks layer by layer, which counts earlier errors as a layer's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.interchange.denoiser import QuantizedLayer, quantize_inputs
from sd_quant.interchange.folding import plain_weight
from sd_quant.interchange.inputs import smoothed
from sd_quant.numbers import finite, relative_error


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer, relative to the norms of the full-precision layer's; None where such a norm is zero."""

    weight: float | None
    output: float | None


def product(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a linear or convolution for ``x`` with another weight, without its bias."""
    if isinstance(module, nn.Conv2d):
        return F.conv2d(x, weight, None, module.stride, module.padding, module.dilation, module.groups)
    return F.linear(x, weight)


def theirs(module: nn.Module, layer: QuantizedLayer, x: Tensor, weight: Tensor) -> Tensor:
    """``product`` of the quantized layer, with rounded inputs and its branch."""
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
    """The errors of ``layers``, each on the inputs that it has in ``network`` while ``run()`` calls it.

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
    """Within the context ``network`` has this quantized layer, all others in full precision."""
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
    """The relative error of the result of ``run()`` with each of these layers alone in ``network``, largest first."""
    expected, errors = run(), {}
    for name in names:
        with put_in(network, name, layers[name]):
            errors[name] = relative_error(expected, run())
        advance()
    return dict(sorted(errors.items(), key=lambda item: -(item[1] or 0)))
