"""Replay an engine's calls on a GPU as a CUDA graph, which avoids Python and launch overhead between its kernels.

A graph is valid for one set of shapes, so a call with other shapes records a new graph. A graph has its own memory, so
inputs and outputs are copied, at little cost. Alternatives not taken: the CUDA graphs of TensorRT for RTX and
torch.compile, each for one runtime only; and a graph for every shape, because each graph keeps its memory.
"""

import torch
from torch import Tensor

from sd_quant.engines.base import Engine, cast_inputs

WARMUP = 3  # calls before the recording, for compilers, and for libraries that choose kernels and reserve memory


class Replayed:
    """An engine that replays the calls of ``engine`` as a CUDA graph; errors of ``engine`` are raised in recording."""

    def __init__(self, engine: Engine):
        self.engine, self.name, self.inputs, self.device = engine, engine.name, engine.inputs, engine.device
        self.recorded: tuple | None = None

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        given = cast_inputs(self.inputs, inputs, self.device)
        if self.recorded is None or tensor_shapes(given) != tensor_shapes(self.recorded[1]):
            self.recorded = None  # frees the old graph's memory before the new one takes some
            self.recorded = record(self.engine, given)
        graph, static, outputs = self.recorded
        for name, tensor in given.items():
            static[name].copy_(tensor)
        graph.replay()
        return {name: tensor.clone() for name, tensor in outputs.items()}

    def reopen(self) -> bool:
        return False  # a graph keeps its addresses

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.recorded = None
        self.engine.close()


def tensor_shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def record(engine: Engine, given: dict[str, Tensor]) -> tuple:
    """Record a call of ``engine``. Returns the CUDA graph, its static input tensors and its output tensors."""
    static = {name: tensor.clone() for name, tensor in given.items()}
    stream = torch.cuda.Stream(engine.device)  # nothing can be recorded on the default stream
    stream.wait_stream(torch.cuda.current_stream(engine.device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            engine(**static)
    torch.cuda.current_stream(engine.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = engine(**static)
    return graph, static, outputs
