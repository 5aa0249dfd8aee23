"""The shapes with which one call of a network calls each of its layers, found without computing anything."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from sd_quant.models.checkpoint import Checkpoint, empty_call
from sd_quant.models.parts import network_in


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The product of a Linear or Conv2d in one call of its network."""

    input_shape: tuple[int, ...]  # [..., in], or [B, C, H, W] of a convolution
    output_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]  # [out, in], or [out, in / groups, height, width]
    bias: bool
    geometry: tuple[Any, ...] = ()  # of a convolution: stride, padding, dilation, groups

    @property
    def outputs(self) -> int:
        """The numbers that each row of the product has."""
        return self.weight_shape[0]

    @property
    def inputs(self) -> int:
        """The numbers that are multiplied and added for each output."""
        return prod(self.weight_shape[1:])

    @property
    def rows(self) -> int:
        """The rows of the product: tokens of all samples, or places of all images."""
        return prod(self.output_shape) // self.outputs

    @property
    def operations(self) -> int:
        """Two for each multiplication with its addition."""
        return 2 * self.rows * self.inputs * self.outputs


LayerCalls = Mapping[str, tuple[LayerCall, ...]]  # by layer, usually one each


class WatchingProducts(TorchFunctionMode):
    """Notes the calls of ``F.linear`` and ``F.conv2d`` with weights of the given names, of modules or of code."""

    def __init__(self, names: Mapping[int, str]):
        """``names``: of layers, by the ``id`` of their weights."""
        super().__init__()
        self.names, self.calls = names, defaultdict[str, list[LayerCall]](list)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (F.linear, F.conv2d):
            given = dict(
                zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)
            )
            given |= kwargs or {}
            weight = given["weight"]
            if name := self.names.get(id(weight)):
                usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
                geometry = tuple(given.get(key, value) for key, value in usual.items()) if weight.ndim > 2 else ()
                x, y, w = (tuple(each.shape) for each in (given["input"], result, weight))
                self.calls[name].append(LayerCall(x, y, w, given.get("bias") is not None, geometry))
        return result


def layer_calls(
    checkpoint: Checkpoint, part: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[LayerCall, ...]]:
    """The calls of each Linear and Conv2d of a part in one call with inputs of these ``shapes``, on the meta device.

    Layers that are not called are absent. Raises whatever the network's code raises where it reads numbers.
    """
    module, inputs = empty_call(checkpoint, part, shapes)
    network = network_in(checkpoint.parts()[part], module)
    layers = (torch.nn.Linear, torch.nn.Conv2d)
    names = {id(layer.weight): name for name, layer in network.named_modules() if isinstance(layer, layers)}
    with torch.no_grad(), torch.device("meta"), WatchingProducts(names) as watching:
        module(**inputs)
    return {name: tuple(calls) for name, calls in watching.calls.items()}
