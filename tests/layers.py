"""Assigned layers to try products on, the numbers that they are tried with, and what layers of a network read."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.statistics import LayerStatistics, Sample

CONVROT = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]  # H4 of ConvRot, Huang et al. 2025


def static_layer(weight: Tensor, fmt: str, per_row: bool, activation_amax: float = 4.0) -> LayerAssignment:
    """``weight`` and its input in ``fmt``, the weight with one scale or with one for each of its rows."""
    amax = weight.abs().flatten(1).amax(1)
    return LayerAssignment(
        "layer", "ffn", tuple(weight.shape), fmt, fmt,
        weight_axis=0 if per_row else None, weight_amax=amax if per_row else amax.amax().view(1),
        activation_amax=activation_amax,
    )  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian numbers, of a seed always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample_of(rows: Tensor) -> Sample:
    return Sample(rows, torch.arange(len(rows)).double())


def statistics_of(rows: Tensor) -> LayerStatistics:
    """Of a linear that read ``rows`` [n, in] in one step, all of them in its sample."""
    return LayerStatistics("linear", rows.abs().amax(0)[None], sample_of(rows))


def turned(x: Tensor, group: int) -> Tensor:
    """``x`` [..., in] with each ``group`` of numbers rotated, in double precision, by the published matrix of four."""
    if not group:
        return x.double()
    four = torch.tensor(CONVROT).double() / 2
    matrix = four
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return (x.double().unflatten(-1, (-1, group)) @ matrix).flatten(-2)


def inputs_seen(network: nn.Module, names: Iterable[str], call: Callable[[], object]) -> dict[str, Tensor]:
    """What each of these layers reads in ``call``, in numbers of fp16, as a runtime is given it."""
    seen = {}

    def remember(name: str) -> Callable:
        return lambda layer, given: seen.__setitem__(name, given[0].half().float())

    hooks = [network.get_submodule(name).register_forward_pre_hook(remember(name)) for name in names]
    call()
    for hook in hooks:
        hook.remove()
    return seen
