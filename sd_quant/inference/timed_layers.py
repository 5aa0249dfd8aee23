"""Times of single layers, measured by the runtime that will compute them.

A layer is called in a graph of its own, as it is exported. What a call takes beside the layer (the runtime's start,
inputs and outputs) is as long as a small layer, so it is measured too, as a graph without the layer, and subtracted;
and a small layer is in its graph several times, each copy with its own input and weight. Outputs are cut to one number
in the graph, because a network does not copy the outputs of its layers either.

All ways to compute a layer are timed in the same rounds, in random order (``metrics.latency``). The road not taken is
the runtime's own profile of a whole network: each runtime has another, some have none, and fused layers share a line.

A layer alone finds its input and its weight in the caches more often than in a network, and fuses with nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from sd_quant.engines.base import Engine
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of, trace
from sd_quant.metrics.latency import Stopping, clock_of, measure_together
from sd_quant.models.layer_calls import LayerCall
from sd_quant.models.parts import Contract
from sd_quant.quantization.arithmetic import Arithmetic, stand_in
from sd_quant.quantization.assignment import LayerAssignment

MOST_COPIES, LARGE = 4, 2e8  # copies of a layer in a graph; operations of a layer that is large enough alone
SECONDS, FEWEST_ROUNDS = 0.2, 7  # of one way to compute a layer
WARMUP = 2
FAST = 10  # percentile of the rounds: other jobs only make a call longer, and a short one many times
SHORTEST = 1e-7  # seconds, below what can be measured
WITHOUT = "without"  # the graph without the layer


class Copies(nn.Module):
    """Several layers of one kind, each with an input of its own; of each output the first number is returned."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype):
        super().__init__()
        self.layers, self.dtype = nn.ModuleList(layers), dtype

    def forward(self, x0: Tensor, x1=None, x2=None, x3=None):
        given = [x for x in (x0, x1, x2, x3) if x is not None]
        outputs = [layer(x.to(self.dtype)) for layer, x in zip(self.layers, given, strict=True)]
        return tuple(output[(slice(0, 1),) * output.ndim].float() for output in outputs)


@dataclass(frozen=True)
class Alone:
    """A layer's call in a graph of its own, which computes in ``dtype`` from inputs in fp32."""

    call: LayerCall
    dtype: torch.dtype

    @property
    def copies(self) -> int:
        """The number of times that the layer is in the graph."""
        return max(1, min(MOST_COPIES, int(LARGE // max(self.call.operations, 1))))

    @property
    def contract(self) -> Contract:
        inputs = {f"x{index}": self.call.input_shape for index in range(self.copies)}
        outputs = tuple(f"y{index}" for index in range(self.copies))
        return Contract(inputs, outputs, dict.fromkeys(inputs, torch.float32), self.dtype)

    def layer(self) -> nn.Module:
        """The layer, with the weights that torch draws."""
        call = self.call
        if not call.geometry:
            return nn.Linear(call.inputs, call.outputs, call.bias)
        stride, padding, dilation, groups = call.geometry
        _, inputs, height, width = call.weight_shape
        return nn.Conv2d(inputs * groups, call.outputs, (height, width), stride, padding, dilation, groups, call.bias)

    def module(self, with_layer: bool = True) -> Copies:
        """The graph as a module, in fp32."""
        layers = [self.layer() if with_layer else nn.Identity() for _ in range(self.copies)]
        return Copies(layers, self.dtype).eval().requires_grad_(False)

    @cached_property
    def graph(self) -> ir.Model:
        """The graph without weights."""
        return trace(self.module, self.contract)

    def assignment(self, module: Copies, arithmetic: Arithmetic | None) -> dict[str, LayerAssignment]:
        """A row for each copy; none for an unquantized layer."""
        if arithmetic is None:
            return {}
        names = [f"layers.{index}" for index in range(self.copies)]
        return {name: stand_in(name, self.call, arithmetic, module.get_parameter(f"{name}.weight")) for name in names}

    def write(self, path: Path, arithmetic: Arithmetic | None, with_layer: bool = True) -> None:
        """Write the graph as an ONNX file."""
        module = self.module(with_layer)
        state = module.state_dict()
        graph = copy_of(self.graph) if with_layer else trace(lambda: module, self.contract)
        write_onnx(
            graph, path, inputs=self.copies, prefix="", read=state.__getitem__,
            assignment=self.assignment(module, arithmetic),
        )  # fmt: skip

    def inputs(self, engine: Engine) -> dict[str, Tensor]:
        """Random inputs on the engine's device, the same for every engine."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(shape, generator=generator).to(engine.device, engine.inputs[name])
            for name, shape in self.contract.inputs.items()
        }


Ways = Mapping[LayerCall, Sequence[Arithmetic | None]]  # the ways to compute each
Opens = Callable[[Alone, Arithmetic | None, bool], Engine]  # the graph with the layer, or without


def measured_seconds(
    ways: Ways, dtype: torch.dtype, opens: Opens, advance: Callable[[], Any] = lambda: None, seconds: float = SECONDS
) -> dict[tuple[LayerCall, Arithmetic | None], float]:
    """Seconds of each layer's call in each of its ways, by the call and the way; ``advance`` is called once a call.

    Raises what opening an engine raises.
    """
    found = {}
    for call, arithmetics in ways.items():
        alone = Alone(call, dtype)
        engines: dict[Any, Engine] = {WITHOUT: opens(alone, None, False)}
        engines |= {way: opens(alone, way, True) for way in arithmetics}
        inputs = alone.inputs(engines[WITHOUT])
        names = {str(index): key for index, key in enumerate(engines)}
        calls = {name: partial(engines[key], **inputs) for name, key in names.items()}
        clocks = dict.fromkeys(calls, clock_of(engines[WITHOUT].device))
        stopping = Stopping(FEWEST_ROUNDS, 0, seconds * len(engines))
        samples = measure_together(calls, WARMUP, stopping, clocks).samples
        taken = {key: np.percentile(samples[name], FAST).item() / 1000 for name, key in names.items()}
        for way in arithmetics:
            found[call, way] = max(SHORTEST, (taken[way] - taken[WITHOUT]) / alone.copies)
        for engine in engines.values():
            engine.close()
        advance()
    return found
