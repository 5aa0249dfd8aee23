"""Search for the module that can absorb a factor for each channel (as in SmoothQuant) of a tensor that linears read.

Candidates are a norm with a weight; a linear whose first outputs are the channels, also through a gate, or through an
attention whose values they are; and a linear that computes a shift and a scale of the channels (a modulation). A module
may absorb the factors only if no other layer would see them. The search walks back from the tensor, element by element,
through reshapes, slices, products and attention, and checks every operation that reads a tensor on the way. An unknown
operation ends the search. Alternative not taken: a list of block patterns, which new kinds of blocks make incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sd_quant.layers.flow import COPIES, MOVES, PERMUTATIONS, RESHAPES, Flow, parameter
from sd_quant.layers.tape import Operation, Value

# The channel index of each element of a tensor, -1 for elements of no channel. Axes that do not matter have length 1.
Channels = Tensor
# By operation, (operand, axis): factors of the operand's channels are factors of the result's channels. The axis is
# summed over or mixed, so channels must not differ along it. Where two operands are named, either may have the factors.
FACTORS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "mul": ((0, None), (1, None)), "div": ((0, None),), "scaled_dot_product_attention": ((2, -2),),
    "matmul": ((1, -2), (0, -1)), "bmm": ((1, -2), (0, -1)),
}  # fmt: skip


def producer_of(flow: Flow, value: Value, readers: set[Operation]) -> tuple[str | None, tuple[int, int] | None]:
    """Return the module that can absorb a factor for each channel of ``value``, and its chunks if it is a modulation.

    Channels are the last axis; ``readers`` are the linears that read ``value``. The results are ``producer`` and
    ``modulation`` of ``SharedInput``; None where there is no such module.
    """
    channels = torch.arange(value.shape[-1]).reshape([1] * (len(value.shape) - 1) + [-1])
    found = _Search(flow).modulation(value, channels, readers)
    if found is not None:
        return found
    origin = _Search(flow).origin(value, channels, readers)
    return (origin[0], None) if origin is not None and origin[1] == 0 else (None, None)


@dataclass(frozen=True)
class _Search:
    """Search back through the operations of ``flow`` for a module that can absorb a tensor's channel factors."""

    flow: Flow

    def alone(self, value: Value, channels: Channels, readers: set[Operation]) -> bool:
        """Whether only ``readers``, each once, read these channels of a value that the network does not return."""
        if value in self.flow.tape.returned:
            return False
        for operation in self.flow.tape.readers.get(value, ()):
            times = sum(each is value for each in operation.values())
            if (times > 1 or operation not in readers) and not _misses(operation, channels):
                return False
        return True

    def uncopied(self, value: Any, channels: Channels, readers: set[Operation]) -> tuple[Value, Operation] | None:
        """Return the tensor that a value copies, and the operation that made it; None if other operations read it."""
        while isinstance(value, Value) and value.operation is not None and self.alone(value, channels, readers):
            if value.operation.kind not in COPIES:
                return value, value.operation
            value, readers = value.operation.operands[0], {value.operation}
        return None

    def origin(
        self, value: Value, channels: Channels, readers: set[Operation], moves_only: bool = False
    ) -> tuple[str, int] | None:
        """Return the norm or linear whose outputs are these channels, and the index of the first of these outputs.

        Between them may be multiplications by other tensors; with ``moves_only`` only copies, views and slices.
        """
        operation = value.operation
        if operation is None or not self.alone(value, channels, readers):
            return None
        if operation.kind == "linear":
            name, rows = self.flow.layer_of(operation), _places(value, channels, -1)
            return None if name is None or rows is None or not self.once(name) else (name, rows.start)
        if not moves_only and (norm := self.norm(value, operation, channels, readers)) is not None:
            return norm, 0
        for source, of_source in _back(value, operation, channels, moves_only):
            if (found := self.origin(source, of_source, {operation}, moves_only)) is not None:
                return found
        return None

    def once(self, module: str) -> bool:
        """Whether a single operation reads the weight of a module, and no other operation reads its bias."""
        uses = [self.flow.weight_uses.get(f"{module}.{name}", []) for name in ("weight", "bias")]
        return len(uses[0]) == 1 and len(uses[1]) <= 1 and all(use in uses[0] for use in uses[1])

    def norm(self, value: Value, operation: Operation, channels: Channels, readers: set[Operation]) -> str | None:
        """Return the norm whose weight and bias were the last to scale and shift all these channels, or None."""
        operands, groups = operation.operands, operation.kind == "group_norm"
        axis = 1 if groups else len(value.shape) - 1
        if _places(value, channels, axis) != range(value.shape[axis]):
            return None
        if operation.kind in ("layer_norm", "rms_norm", "group_norm") and len(operands) > 2:
            name = (parameter(operands[2]) or "").removesuffix(".weight")
            return name if name and (groups or len(operands[1]) == 1) and self.once(name) else None
        biased, width = None, (value.shape[axis],)
        if operation.kind == "add" and not operation.options:
            for x, bias in (operands[:2], operands[1::-1]):
                name = parameter(bias) or ""
                if name.endswith(".bias") and bias.shape == width and isinstance(x, Value):
                    if (found := self.uncopied(x, channels, {operation})) is None:
                        return None
                    biased, operation = name.removesuffix(".bias"), found[1]
                    break
        for weight in operation.operands[:2] if operation.kind == "mul" else ():
            name = (parameter(weight) or "").removesuffix(".weight")
            if name and name != parameter(weight) and weight.shape == width and name not in self.flow.layers:
                has_bias = f"{name}.bias" in self.flow.tape.parameters
                uses = [len(self.flow.weight_uses.get(f"{name}.{each}", ())) for each in ("weight", "bias")]
                if (biased == name) == has_bias and biased in (None, name) and uses == [1, int(has_bias)]:
                    return name
        return None

    def modulation(
        self, value: Value, channels: Channels, readers: set[Operation]
    ) -> tuple[str, tuple[int, int]] | None:
        """Return the linear of a modulation, ``x * (1 + scale) + shift``, and its chunks (shift, scale), or None."""
        found = self.uncopied(value, channels, readers)
        if found is None or found[1].options:
            return None
        tried, (value, last) = list[tuple[Any, Sequence, Operation]](), found
        if last.kind == "addcmul":
            tried.append((last.operands[0], last.operands[1:3], last))
        elif last.kind == "add":
            for product, shift in (last.operands[:2], last.operands[1::-1]):
                made = self.uncopied(product, channels, {last})
                if made is not None and made[1].kind == "mul":
                    tried.append((shift, made[1].operands[:2], made[1]))
        for shift, factors, product in tried:
            for factor in factors:
                if isinstance(shift, Value) and isinstance(factor, Value):
                    chunks = self.chunks(value, channels, (shift, last), (factor, product))
                    if chunks is not None:
                        return chunks
        return None

    def chunks(
        self, value: Value, channels: Channels, added: tuple[Value, Operation], multiplied: tuple[Value, Operation]
    ) -> tuple[str, tuple[int, int]] | None:
        """Return the linear that computes both shift and scale, and the index of each of these chunks in its outputs.

        ``added`` is the shift, ``multiplied`` the factor 1 + scale, each with the operation that reads it.
        """
        (shift, addition), (factor, reader) = added, multiplied
        of_shift, of_factor = (_fitted(channels, each.shape) for each in (shift, factor))
        if of_shift is None or of_factor is None:
            return None
        while factor.operation is not None and factor.operation.kind in MOVES:
            back = next(_back(factor, factor.operation, of_factor, moves_only=True), None)
            if back is None or not self.alone(factor, of_factor, {reader}):
                return None
            reader, (factor, of_factor) = factor.operation, back
        one = factor.operation
        if one is None or one.kind != "add" or one.options or not self.alone(factor, of_factor, {reader}):
            return None
        scale = next((each for each in one.operands[:2] if isinstance(each, Value)), None)
        if scale is None or [each for each in one.operands[:2] if not isinstance(each, Value)] != [1]:
            return None
        first = self.origin(shift, of_shift, {addition}, moves_only=True)
        second = self.origin(scale, of_factor, {one}, moves_only=True)
        width = value.shape[-1]
        if first is None or second is None or first[0] != second[0]:
            return None
        name, starts = first[0], (first[1], second[1])
        if any(start % width for start in starts) or self.flow.layers[name].bias is None:  # the bias holds the 1
            return None
        return name, (starts[0] // width, starts[1] // width)


def _misses(operation: Operation, channels: Channels) -> bool:
    """Whether an operation is a slice or select of a part of a tensor without any of these channels."""
    if operation.kind == "select" or (operation.kind == "slice" and operation.options["step"] == 1):
        axis, start, length = _part(operation)
        return channels.shape[axis] > 1 and bool((channels.narrow(axis, start, length) < 0).all())
    return False


def _part(operation: Operation) -> tuple[int, int, int]:
    """Return axis, start and length of the part that a slice or select takes."""
    options = operation.options
    return options["axis"], options.get("start", options.get("index")), options.get("length", 1)


def _places(value: Value, channels: Channels, axis: int) -> range | None:
    """Return where along an axis the channels lie, in order; None if out of order, or not along this axis alone."""
    if channels.numel() != channels.shape[axis]:
        return None
    row = channels.flatten().expand(value.shape[axis])
    found = (row >= 0).nonzero().flatten().tolist()
    places = range(found[0], found[0] + len(found))
    return places if torch.equal(row[places.start : places.stop], torch.arange(len(places))) else None


def _back(value: Value, operation: Operation, channels: Channels, moves_only: bool) -> Iterator[tuple[Value, Channels]]:
    """Yield (operand, channels of its elements) where channel factors would have the same effect as on ``value``."""
    operands = operation.operands
    if operation.kind in MOVES and isinstance(operands[0], Value):
        before = _before(operation, value, operands[0], channels)
        if before is not None:
            yield operands[0], before
    for place, mixed in () if moves_only else FACTORS.get(operation.kind, ()):
        operand = operands[place]
        if isinstance(operand, Value) and (mixed is None or len(operand.shape) == len(value.shape)):
            if (fitted := _fitted(channels, operand.shape, mixed)) is not None:
                yield operand, fitted


def _before(operation: Operation, value: Value, source: Value, channels: Channels) -> Channels | None:
    """Map ``channels`` of ``value`` to ``source``, which ``operation`` copies, reshapes or cuts; None if impossible."""
    kind, rank = operation.kind, len(source.shape)
    if kind in COPIES:
        return channels if value.shape == source.shape else None
    if kind in ("expand", "expand_as"):
        return _fitted(channels, source.shape)
    if kind in RESHAPES:
        return _thin(channels.expand(value.shape).reshape(source.shape))
    if kind in PERMUTATIONS:  # strides name the axes
        named = torch.empty_strided((1,) * rank, tuple(range(rank)))
        order = getattr(torch.ops.aten, kind)(named, *operation.operands[1:], **operation.options).stride()
        return channels.permute([order.index(axis) for axis in range(rank)])
    if operation.options.get("step", 1) != 1:
        return None
    axis, start, length = _part(operation)
    channels = channels.unsqueeze(axis) if kind == "select" else channels
    if channels.shape[axis] == 1 and (length > 1 or source.shape[axis] == 1):
        return channels  # all tokens count where some are taken
    size = [*channels.shape]
    size[axis] = source.shape[axis]
    whole = channels.new_full(size, -1)
    whole.narrow(axis, start, length).copy_(channels)
    return whole


def _fitted(channels: Channels, shape: Sequence[int], mixed: int | None = None) -> Channels | None:
    """Return the channels of a tensor of ``shape``, aligned as in broadcasting; None if the shape cannot hold them.

    Each axis along which channels differ must exist with the same length, and must not be the axis ``mixed``.
    """
    missing, not_apart = channels.ndim - len(shape), None if mixed is None else channels.ndim + mixed
    for axis, length in enumerate(channels.shape):
        if length > 1 and (axis < missing or shape[axis - missing] != length or axis == not_apart):
            return None
    return channels.reshape(channels.shape[missing:])


def _thin(channels: Channels) -> Channels:
    """Reduce each axis along which all elements have the same channel to length 1."""
    for axis, stride in enumerate(channels.stride()):
        first = channels.narrow(axis, 0, 1)
        if stride == 0 or bool((channels == first).all()):
            channels = first
    return channels
