"""Assigned layers to try products on, and what layers of a network read."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from sd_quant.quantization.assignment import LayerAssignment


def static_layer(weight: torch.Tensor, fmt: str, per_row: bool, activation_amax: float = 4.0) -> LayerAssignment:
    """``weight`` and its input in ``fmt``, the weight with one scale or with one for each of its rows."""
    amax = weight.abs().flatten(1).amax(1)
    return LayerAssignment(
        "layer", "ffn", tuple(weight.shape), fmt, fmt,
        weight_axis=0 if per_row else None, weight_amax=amax if per_row else amax.amax().view(1),
        activation_amax=activation_amax,
    )  # fmt: skip


def inputs_seen(network: nn.Module, names: Iterable[str], call: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What each of these layers reads in ``call``, in numbers of fp16, as a runtime is given it."""
    seen = {}

    def remember(name: str) -> Callable:
        return lambda layer, given: seen.__setitem__(name, given[0].half().float())

    hooks = [network.get_submodule(name).register_forward_pre_hook(remember(name)) for name in names]
    call()
    for hook in hooks:
        hook.remove()
    return seen
