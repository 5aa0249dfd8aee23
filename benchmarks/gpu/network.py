"""A network of the table, of whatever family: its random weights, the inputs of its calls, statistics of its layers.

Weights are random, because latency does not depend on them, and the same on every machine, so that an assignment
derived on one holds on another.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.engines.torch import TorchEngine, placed
from sd_quant.models.parts import Part, axes
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Statistics

from .scales import Assignment

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network with weights, and what its family says of it."""

    module: nn.Module  # that is called, as ``part`` wraps it
    part: Part
    family: Any  # of sd_quant.models: knows the roles of its layers
    samples: int  # of a call for one picture
    known: Callable[[int], Inputs]  # inputs of such a call that are no noise, for pictures of so many pixels a side
    assign: Callable[["Network", Statistics, Recipe], Assignment]  # where the weights are
    loop: Callable[[Engine, Inputs, int], Callable[[], Tensor]] | None = None  # all steps of a picture

    @property
    def inner(self) -> nn.Module:
        """The network itself, which the names of layers are relative to."""
        return self.module.get_submodule(self.part.prefix.removesuffix("."))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


def fill(module: nn.Module) -> nn.Module:
    """Give a module that was built on the meta device weights of a device, the same on every device and machine.

    The number of a weight in its tensor, mixed by multiplications and shifts (Mueller's 32-bit hash), is uniform
    between -1 and 1 over the square root of what a row adds up, as torch's own first weights are.
    """
    for salt, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.ndim == 1:
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            parameter.fill_(1.0 if "Norm" in owner and name.endswith("weight") else 0.0)
            continue
        bound, rows = parameter[0].numel() ** -0.5, parameter.view(-1, parameter[0].numel())
        for start in range(0, len(rows), 1024):
            row = torch.arange(start, min(start + 1024, len(rows)), device=parameter.device)
            number = row[:, None] * rows.shape[1] + torch.arange(rows.shape[1], device=parameter.device)
            number = (number + 1_000_003 * salt) & 0xFFFFFFFF
            for _ in range(2):
                number = ((number ^ (number >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            number = (number ^ (number >> 16)) >> 8  # 24 bits, which fp32 holds exactly
            rows[start : start + 1024] = (number.float() * 2.0**-23 - 1.0) * bound
    return module


def empty(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module of the meta device with room on another, and parameters of this dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.eval().requires_grad_(False).to_empty(device=device)


def with_weights(module: nn.Module, device: torch.device, dtype: torch.dtype, baseline: torch.dtype) -> nn.Module:
    """A module of the meta device with weights on another. They are the baseline's whatever the dtype."""
    module = fill(empty(module, device, dtype))
    for parameter in module.parameters():
        parameter.copy_(parameter.to(baseline))
    return placed(module, device, dtype)


def twin(module: nn.Module, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> nn.Module:
    """A copy of a module that has its tensors, or what is made of each."""
    return copy.deepcopy(module, {id(tensor): of(tensor) for tensor in (*module.parameters(), *module.buffers())})


def engine_of(network: Network, module: nn.Module) -> TorchEngine:
    """``module`` computes the network, in one way or another."""
    return TorchEngine(module, network.part.contract)


def inputs_of(network: Network, pictures: int, size: int) -> Inputs:
    """The inputs of one call, on the device of the network: every picture has the samples that are calibrated with."""
    random, contract = torch.Generator().manual_seed(1), network.part.contract
    shapes = contract.shapes(**axes(network.samples, size, size))
    inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | network.known(size)
    repeated = {
        name: torch.cat([tensor] * pictures) if contract.inputs[name][0] == "batch" else tensor
        for name, tensor in inputs.items()
    }
    engine = engine_of(network, network.module)
    return cast_inputs(engine.inputs, repeated, engine.device)


def statistics_of(network: Network, inputs: Inputs) -> Statistics:
    """Statistics of the layers over one picture and one step, with all its samples."""
    roles = network.family.layer_roles(network.inner)
    layers = {name: network.inner.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    with collect(network.module, layers, range(1), 1, lambda: (0, [0]), draw(layers, range(1), 1, seed=0)) as found:
        network.module(**inputs)
    return found
