"""Data flow in the recorded run (tape) of a network: which layers and attentions each tensor comes from and goes to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import nn

from sd_quant.layers.tape import Operation, Tape, Value

MATRICES = re.compile(r"linear|conv\w*|matmul|einsum|\w*mm")  # operations that may multiply by a layer's weight
PRODUCTS = re.compile(r"matmul|einsum|\w*mm")  # and by another tensor
ATTENTION = re.compile(r"_?scaled_dot_product\w*")
ACTIVATIONS = (
    "gelu", "silu", "relu", "relu6", "sigmoid", "tanh", "mish", "elu", "celu", "selu", "leaky_relu", "softplus",
    "hardswish", "hardsigmoid", "hardtanh", "glu", "log_sigmoid", "softmax",
)  # fmt: skip
COPIES = (
    "to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias", "dropout", "feature_dropout", "lift_fresh",
    "positive",
)  # fmt: skip
RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "reshape_as", "view_as")
PERMUTATIONS = ("permute", "transpose", "t", "mT", "swapaxes", "swapdims", "movedim", "moveaxis", "numpy_T")
MOVES = (*COPIES, *RESHAPES, *PERMUTATIONS, "slice", "select", "expand", "expand_as")  # no number changes


@dataclass(frozen=True)
class Call:
    """One call of a layer."""

    name: str  # of the layer
    operation: Operation
    input: Value
    output: Value
    place: int  # index among all calls of layers


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """Facts about the layers of a network, computed from the tape of one run."""

    network: nn.Module
    tape: Tape
    text: tuple[str, ...]  # arguments of the network that are computed from the prompt alone

    @cached_property
    def layers(self) -> dict[str, nn.Module]:
        """Every Linear and Conv2d by name, in the network's order."""
        modules = self.network.named_modules()
        return {name: module for name, module in modules if isinstance(module, nn.Linear | nn.Conv2d)}

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """Calls of each Linear and Conv2d in the order of the run, by the layer's name."""
        found, place = defaultdict[str, list[Call]](list), 0
        for operation in self.tape.operations:
            name = self.layer_of(operation)
            if name is not None:
                output = self.tape.outputs[operation][0]
                found[name].append(Call(name, operation, operation.operands[0], output, place))
                place += 1
        return found

    @cached_property
    def weight_uses(self) -> dict[str, list[Operation]]:
        """Operations that read a parameter or a copy of the parameter, by the parameter's name."""
        uses = defaultdict[str, list[Operation]](list)
        for operation in self.tape.operations:
            if operation.kind not in COPIES:
                for value in operation.values():
                    if (name := parameter(value)) is not None:
                        uses[name].append(operation)
        return uses

    def layer_of(self, operation: Operation) -> str | None:
        """Return the name of the Linear or Conv2d whose whole weight this operation multiplies by, or None."""
        if not is_layer(operation) or len(operation.operands) < 2:
            return None
        name = (parameter(operation.operands[1]) or "").removesuffix(".weight")
        return name if name in self.layers and operation.kind in ("linear", "conv2d", "convolution") else None

    @cached_property
    def behind(self) -> tuple[dict[Value, bool], dict[Value, bool]]:
        """Maps of values to whether a layer's output goes into the value, and whether an attention's output does."""
        layer, attention = dict[Value, bool](), dict[Value, bool]()
        for operation in self.tape.operations:
            values = list(operation.values())
            made = is_layer(operation) or any(layer.get(value, False) for value in values)
            attended = self.attends(operation, layer) or any(attention.get(value, False) for value in values)
            for output in self.tape.outputs[operation]:
                layer[output], attention[output] = made, attended
        return layer, attention

    def attends(self, operation: Operation, layer: Mapping[Value, bool]) -> bool:
        """Whether the operation is an attention: fused, or a product of two values that ``layer`` maps to True."""
        if ATTENTION.fullmatch(operation.kind):
            return True
        made = [value for value in operation.values() if layer.get(value, False)]
        return PRODUCTS.fullmatch(operation.kind) is not None and len(made) > 1

    @cached_property
    def attended(self) -> list[Operation]:
        """All attention operations, in order."""
        return [operation for operation in self.tape.operations if self.attends(operation, self.behind[0])]

    @cached_property
    def ahead(self) -> dict[Value, bool]:
        """Map of values that go into the network's output to whether a layer lies between value and output."""
        found = dict.fromkeys(self.tape.returned, False)
        for operation in reversed(self.tape.operations):
            outputs = [output for output in self.tape.outputs[operation] if output in found]
            if outputs:
                more = is_layer(operation) or any(found[output] for output in outputs)
                for value in operation.values():
                    found[value] = found.get(value, False) or more
        return found

    def one_row(self, name: str) -> bool:
        """Whether a layer reads at most one vector for each sample in every call (a timestep), instead of tokens."""
        layer = self.layers[name]
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        return all(prod(call.input.shape) <= width * self.tape.samples for call in self.calls[name])

    @cached_property
    def token_wise(self) -> set[Value]:
        """Values with a path to the network's output without layers that read one vector a sample (``one_row``)."""
        narrow = {call.operation for name, calls in self.calls.items() if self.one_row(name) for call in calls}
        found = set(self.tape.returned)
        for operation in reversed(self.tape.operations):
            if operation not in narrow and any(output in found for output in self.tape.outputs[operation]):
                found.update(operation.values())
        return found

    @cached_property
    def queries(self) -> set[str]:
        """Layers whose output becomes query, key or value of an attention with no other layer between."""
        met, found = set[Value](), set[str]()
        attentions = set(self.attended)
        waiting = [value for operation in self.attended for value in list(operation.values())[:3]]  # the next is a mask
        while waiting:
            value = waiting.pop()
            if value in met or value.operation is None or value.operation in attentions:
                continue
            met.add(value)
            if is_layer(value.operation):
                if (name := self.layer_of(value.operation)) is not None:
                    found.add(name)
            else:
                waiting += value.operation.values()
        return found

    @cached_property
    def feed_forward(self) -> set[str]:
        """Linears of feed-forwards: both of two linears with only an activation (and gates) between them."""
        found = set[str]()
        for name, calls in self.calls.items():
            for call in calls:
                if call.operation.kind == "linear" and (before := self.activated(call.input)):
                    found |= {name, *before}
        return found

    def activated(self, value: Value) -> set[str]:
        """Return the linears from which an activation (and gates) alone compute a value; otherwise an empty set."""
        found, activation, waiting, met = set[str](), False, [value], set[Value]()
        while waiting:
            current = waiting.pop()
            operation = current.operation
            if operation is None or current in met:
                continue
            met.add(current)
            if operation.kind == "linear":
                found.add(self.layer_of(operation) or "")
            elif operation.kind in (*MOVES, "mul", "clamp", *ACTIVATIONS):
                activation = activation or operation.kind in ACTIVATIONS
                waiting += operation.values()
            else:
                return set()
        return found if activation and "" not in found else set()

    @cached_property
    def content(self) -> set[str]:
        """Names of inputs that hold image or text, not times or sizes: text, and tensors of three axes or more."""
        return {name for name, value in self.tape.inputs.items() if len(value.shape) > 2 or self.of_text(name)}

    def is_text(self, value: Value) -> bool:
        """Whether a value depends on the prompt alone."""
        return bool(value.depends) and all(self.of_text(name) for name in value.depends)

    def of_text(self, name: str) -> bool:
        """Whether the network's input ``name`` is one of the arguments ``text``, or nested in such an argument."""
        return any(name == each or name.startswith(f"{each}.") for each in self.text)


def is_layer(operation: Operation) -> bool:
    """Whether an operation multiplies by a matrix that is a parameter."""
    if MATRICES.fullmatch(operation.kind) is None:
        return False
    return any(len(value.shape) > 1 and parameter(value, MOVES) is not None for value in operation.values())


def parameter(value: Any, through: Sequence[str] = COPIES) -> str | None:
    """Return the name of the parameter or buffer that a value is, or copies by operations ``through``; else None."""
    while isinstance(value, Value) and value.operation is not None and value.operation.kind in through:
        value = value.operation.operands[0]
    known = isinstance(value, Value) and value.operation is None and not value.depends
    return value.name if known else None
