"""Export description (``Part``) of any network, derived from its recorded calls, not written by hand as in a family.

The traced module takes one tensor for each input, rebuilds the arguments of the recorded calls and calls the network
itself, changed only by its remedies. Alternative not taken: a copy of each class's forward with simpler arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sd_quant.models.empty import run
from sd_quant.models.parts import Contract, NamedForward, Part
from sd_quant.observed.calls import Signature, as_reals, given_tensors, rebuilt, result_tensors
from sd_quant.observed.pairs import RealNumbers, with_real_constants
from sd_quant.observed.sizes import Outside, given_outputs, named_tensors

PREFIX = "network."  # of weights' names
PRODUCTS = {functional.linear, functional.conv1d, functional.conv2d, functional.conv3d}  # of (input, weight, ...)
REALS = "reals"  # the remedy of pairs.py
SIZES = "sizes"  # modules whose outputs depend on sizes alone are computed outside of the graph
KNOWN = "known"  # likewise modules without weights whose inputs depend on no weight
BUFFERS = "buffers"  # float buffers are in the dtype of the weights, as after ``module.to(dtype)``
INPUTS = "inputs"  # inputs of linears and convolutions are cast to the dtype of their weights, as by autocast


@dataclass(frozen=True)
class Verified:
    """A runtime's agreement with a network on recorded calls."""

    calls: int
    error: float  # the largest error of an output, relative to its norm

    def __str__(self) -> str:
        return f"{self.calls} calls within {self.error:.1g}"


@dataclass(frozen=True)
class Rung:
    """Result of an export: the changes of the network (remedies) that make its graph right, or the cause of refusal."""

    name: str  # what is changed, in words (``ladder.RUNGS``), or "refused"
    signature: Signature | None = None
    method: str = "forward"
    remedies: tuple[str, ...] = ()  # changes of the network for tracing: REALS, SIZES, KNOWN, BUFFERS, INPUTS
    verified: dict[str, Verified] = field(default_factory=dict)  # by runtime
    refused: dict[str, str] = field(default_factory=dict)  # causes of failure by runtime; of a refusal, by rung
    serves: tuple[int, ...] = ()  # indices of the recorded calls that the graph computes
    weights: str = "float32"  # dtype of the exported weights, see ``ladder.climb``
    single: tuple[str, ...] = ()  # names of float inputs that stay in fp32
    notes: tuple[str, ...] = ()  # sentences for the report
    cause: str | None = None  # of a refusal


class InputsAsWeights(TorchFunctionMode):
    """Torch function mode that casts the input of a linear or a convolution to the dtype of its weight."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        if func in PRODUCTS and len(args) > 1 and args[0].dtype != args[1].dtype:
            args = (args[0].to(args[1].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


class ObservedNetwork(nn.Module):
    """Wrapper for tracing: takes one tensor for each input of the signature, and returns a tuple of tensors."""

    def __init__(self, network: nn.Module, signature: Signature, rung: Rung):
        super().__init__()
        self.network = with_real_constants(network) if REALS in rung.remedies else network
        if BUFFERS in rung.remedies:
            for buffer in filter(Tensor.is_floating_point, network.buffers()):
                buffer.data = buffer.data.to(getattr(torch, rung.weights))
        self.signature, self.method, self.remedies = signature, rung.method, rung.remedies
        self.forward = NamedForward(self, signature.inputs)

    def called(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with ExitStack() as stack:
            if REALS in self.remedies:
                stack.enter_context(RealNumbers())
            if INPUTS in self.remedies:
                stack.enter_context(InputsAsWeights())
            if self.signature.outside:
                stack.enter_context(given_outputs(self.network, self.signature.outside, tensors))
            return result_tensors(run(self.network, self.method, rebuilt(self.signature.arguments, tensors)))


def inputs_of(
    signature: Signature, outside: Outside | None, contract: Contract, given: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the graph's inputs from the arguments of a pipeline's call; ``outside`` computes further inputs.

    Raises SdQuantError for a call whose structure or constants differ from the recorded calls.
    """
    tensors = given_tensors(signature, given)
    if outside is not None:
        tensors |= {name: as_reals(each) for name, each in named_tensors(signature.outside, outside(given)).items()}
    return tensors


def part_of(component: str, signature: Signature, rung: Rung, build: Callable[[], nn.Module] | None = None) -> Part:
    """Return the ``Part`` of a network with this ``signature``. The part can be pickled if ``build`` can.

    Float inputs are in the dtype of the weights, except those in ``rung.single``, which are in fp32. ``build`` returns
    the network without weights, and is needed where some inputs are computed outside of the graph.
    """
    outside, weights = None, getattr(torch, rung.weights)
    if signature.outside:
        counts = {path: len(trees) for path, trees in signature.outside.items()}
        outside = Outside(build, rung.method, counts, KNOWN not in rung.remedies)
    dtypes = {name: getattr(torch, dtype) for name, dtype in signature.dtypes.items()}
    for name, dtype in dtypes.items():
        if dtype.is_floating_point:
            dtypes[name] = torch.float32 if name in rung.single else weights
    contract = Contract(signature.inputs, signature.results, dtypes, weights, None, signature.example)
    wrap, answer = partial(ObservedNetwork, signature=signature, rung=rung), partial(rebuilt, signature.outputs)
    return Part(component, PREFIX, contract, wrap, answer, partial(inputs_of, signature, outside), method=rung.method)
