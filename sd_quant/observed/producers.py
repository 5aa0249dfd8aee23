"""Which module can absorb a factor of each channel of a tensor that linears read.

A norm with a weight, a linear whose first rows are the channels (also through attention, of which they are the values,
and through a gate), or a linear that makes a shift and a scale of them. It may absorb the factor only if nothing but
the tensor's readers would see it. So the search walks back from the tensor, number by number, not by kinds of block:
through reshapes, slices, products and attention, and looks at all readers of all that it meets. Whatever it does not
know ends it. The road not taken is a list of patterns of blocks, which is complete until somebody writes another block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sd_quant.observed.flow import COPIES, MOVES, PERMUTATIONS, RESHAPES, Flow, parameter
from sd_quant.observed.tape import Operation, Value

# The places of a tensor that hold its channels: for some axes the first index and how many. Every other axis holds
# all its indices for each channel. Channels are counted in the order of the windows, the last one fastest.
Windows = tuple[tuple[int, int, int], ...]


def producer_of(flow: Flow, value: Value, readers: set[Operation]) -> tuple[str | None, tuple[int, int] | None]:
    """Returns the module that can absorb a factor of each channel of ``value``, and the chunks of a modulation.

    Channels are the last axis; ``readers`` are the linears. Both are as in ``SharedInput``, and None if there is none.
    """
    width = value.shape[-1]
    windows = ((len(value.shape) - 1, 0, width),)
    found = _Search(flow).modulation(value, windows, readers)
    if found is not None:
        return found
    origin = _Search(flow).origin(value, windows, readers)
    return (origin[0], None) if origin is not None and origin[1] == 0 else (None, None)


@dataclass(frozen=True)
class _Search:
    """A walk back from a tensor to a module that can absorb a factor of each of its channels."""

    flow: Flow

    def alone(self, value: Value, windows: Windows, readers: set[Operation]) -> bool:
        """Whether nothing but ``readers``, each once, reads these channels of a value."""
        if value in self.flow.tape.returned:
            return False
        for operation in self.flow.tape.readers.get(value, ()):
            times = sum(each is value for each in operation.values())
            if (times > 1 or operation not in readers) and not _misses(operation, windows):
                return False
        return True

    def origin(
        self, value: Value, windows: Windows, readers: set[Operation], moves_only: bool = False
    ) -> tuple[str, int] | None:
        """The norm or linear whose outputs, from the first one that is returned, are these channels.

        Only multiplications by other numbers may lie between, with ``moves_only`` not even those.
        """
        operation = value.operation
        if operation is None or not windows or not self.alone(value, windows, readers):
            return None
        if operation.kind == "linear":
            name = self.flow.layer_of(operation)
            rows = windows[0] if len(windows) == 1 and windows[0][0] == len(value.shape) - 1 else None
            return None if name is None or rows is None or not self.once(name) else (name, rows[1])
        if not moves_only and (norm := self.norm(value, windows, readers)) is not None:
            return norm, 0
        for source, places in _back(value, windows, moves_only):
            if (found := self.origin(source, places, {operation}, moves_only)) is not None:
                return found
        return None

    def once(self, module: str) -> bool:
        """Whether weight and bias of a module are each read by one operation."""
        uses = [self.flow.weight_uses.get(f"{module}.{name}", []) for name in ("weight", "bias")]
        return len(uses[0]) == 1 and len(uses[1]) <= 1 and all(use in uses[0] for use in uses[1])

    def norm(self, value: Value, windows: Windows, readers: set[Operation]) -> str | None:
        """The module that multiplied all these channels by its weight, and added its bias, in the last operations."""
        operation, width = value.operation, windows[-1][2]
        operands = operation.operands
        if operation.kind in ("layer_norm", "rms_norm", "group_norm") and len(operands) > 2:
            axis = 1 if operation.kind == "group_norm" else len(value.shape) - 1
            name = (parameter(operands[2]) or "").removesuffix(".weight")
            whole = windows == ((axis, 0, value.shape[axis]),)
            one_axis = operation.kind == "group_norm" or len(operands[1]) == 1
            return name if whole and one_axis and name and self.once(name) else None
        biased = None
        if operation.kind == "add" and not operation.options:
            for x, bias in (operands[:2], operands[1::-1]):
                name = parameter(bias) or ""
                if name.endswith(".bias") and bias.shape == (width,) and isinstance(x, Value):
                    biased, last = name.removesuffix(".bias"), {operation}
                    while x.operation is not None and x.operation.kind in COPIES and self.alone(x, windows, last):
                        last, x = {x.operation}, x.operation.operands[0]
                    if not self.alone(x, windows, last) or x.operation is None:
                        return None
                    operation, value = x.operation, x
                    operands = operation.operands
                    break
        if operation.kind != "mul" or windows != ((len(value.shape) - 1, 0, value.shape[-1]),):
            return None
        for weight in operands[:2]:
            name = (parameter(weight) or "").removesuffix(".weight")
            if name and name != parameter(weight) and weight.shape == (width,) and name not in self.flow.layers:
                has_bias = f"{name}.bias" in self.flow.tape.parameters
                uses = [len(self.flow.weight_uses.get(f"{name}.{each}", ())) for each in ("weight", "bias")]
                if (biased == name) == has_bias and biased in (None, name) and uses == [1, int(has_bias)]:
                    return name
        return None

    def modulation(self, value: Value, windows: Windows, readers: set[Operation]) -> tuple[str, tuple[int, int]] | None:
        """The linear whose chunks (shift, scale) made ``value`` as ``x * (1 + scale) + shift``, and the two chunks."""
        while value.operation is not None and value.operation.kind in COPIES and self.alone(value, windows, readers):
            value, readers = value.operation.operands[0], {value.operation}
        operation = value.operation
        if operation is None or not self.alone(value, windows, readers) or operation.options:
            return None
        if operation.kind == "addcmul":
            shift, *factors = operation.operands[:3]
            tried = [(shift, factors, operation)]
        elif operation.kind == "add":
            a, b = operation.operands[:2]
            tried = []
            for product, shift in ((a, b), (b, a)):
                last = {operation}
                while isinstance(product, Value) and product.operation is not None and product.operation.kind in COPIES:
                    if not self.alone(product, windows, last):
                        break
                    product, last = product.operation.operands[0], {product.operation}
                made = product.operation if isinstance(product, Value) else None
                if made is not None and made.kind == "mul" and self.alone(product, windows, last):
                    tried.append((shift, list(made.operands[:2]), made))
        else:
            return None
        for shift, factors, product in tried:
            for factor in factors:
                found = self.chunks(value, windows, shift, factor, operation, product)
                if found is not None:
                    return found
        return None

    def chunks(
        self, value: Value, windows: Windows, shift: Any, factor: Any, addition: Operation, product: Operation
    ) -> tuple[str, tuple[int, int]] | None:
        """The linear and the chunks of ``shift`` and of the scale in ``factor``, 1 + scale, which they make alone."""
        if not isinstance(shift, Value) or not isinstance(factor, Value):
            return None
        shift_at, factor_at = (_broadcast(value.shape, each.shape, windows) for each in (shift, factor))
        if shift_at is None or factor_at is None:
            return None
        last = {product}
        while factor.operation is not None and factor.operation.kind in MOVES:
            back = next(iter(_back(factor, factor_at, moves_only=True)), None)
            if back is None or not self.alone(factor, factor_at, last):
                return None
            last, (factor, factor_at) = {factor.operation}, back
        one = factor.operation
        if one is None or one.kind != "add" or one.options or not self.alone(factor, factor_at, last):
            return None
        scale = next((each for each in one.operands[:2] if isinstance(each, Value)), None)
        if scale is None or [each for each in one.operands[:2] if not isinstance(each, Value)] != [1]:
            return None
        origins = (
            self.origin(shift, shift_at, {addition}, moves_only=True),
            self.origin(scale, factor_at, {one}, moves_only=True),
        )
        width = windows[0][2]
        if None in origins or origins[0][0] != origins[1][0] or any(start % width for _, start in origins):
            return None
        name = origins[0][0]
        if self.flow.layers[name].bias is None:  # it holds the 1 of 1 + scale
            return None
        return name, (origins[0][1] // width, origins[1][1] // width)


def _misses(operation: Operation, windows: Windows) -> bool:
    """Whether an operation takes a part of a tensor that has nothing in common with these channels."""
    if operation.kind == "slice" and operation.options["step"] == 1:
        start, end = operation.options["start"], operation.options["start"] + operation.options["length"]
    elif operation.kind == "select":
        start, end = operation.options["index"], operation.options["index"] + 1
    else:
        return False
    axis = operation.options["axis"]
    return any(each == axis and (first + count <= start or end <= first) for each, first, count in windows)


def _back(value: Value, windows: Windows, moves_only: bool) -> Iterator[tuple[Value, Windows]]:
    """Each operand of which a factor of these channels is a factor of its own channels, and where they are in it.

    Operands that could absorb it alternatively, one of two factors, come one after the other.
    """
    operation = value.operation
    source = operation.operands[0] if operation.operands else None
    if operation.kind in MOVES:
        places = _before(operation, value, source, windows) if isinstance(source, Value) else None
        if places is not None:
            yield source, places
    if moves_only:
        return
    if operation.kind in ("mul", "div"):
        for factor in operation.operands[: 2 if operation.kind == "mul" else 1]:
            if isinstance(factor, Value):
                places = _broadcast(value.shape, factor.shape, windows)
                if places is not None:
                    yield factor, places
    elif operation.kind == "scaled_dot_product_attention":
        yield from _of_same_axes(value, operation.operands[2], windows, never=-2)
    elif operation.kind in ("matmul", "bmm"):
        yield from _of_same_axes(value, operation.operands[1], windows, never=-2)
        yield from _of_same_axes(value, operation.operands[0], windows, never=-1)


def _of_same_axes(value: Value, operand: Any, windows: Windows, never: int) -> Iterator[tuple[Value, Windows]]:
    """An operand of a product with the same axes as the product, but for the one that is summed over."""
    rank = len(value.shape)
    if isinstance(operand, Value) and len(operand.shape) == rank:
        if all(axis != rank + never and operand.shape[axis] == value.shape[axis] for axis, _, _ in windows):
            yield operand, windows


def _before(operation: Operation, value: Value, source: Value, windows: Windows) -> Windows | None:
    """Where channels of ``value`` are in ``source``, of which it is a copy, a view or a part; None if in no window."""
    kind, options = operation.kind, operation.options
    if kind in COPIES:
        return windows if value.shape == source.shape else None
    if kind in ("expand", "expand_as"):
        return _broadcast(value.shape, source.shape, windows)
    if kind in RESHAPES:
        return _reshaped(value.shape, source.shape, windows)
    if kind in PERMUTATIONS:
        axes = _permutation(operation, len(source.shape))
        return None if axes is None else tuple((axes[axis], start, count) for axis, start, count in windows)
    axis = options["axis"]
    if kind == "select":
        return ((axis, options["index"], 1), *((each + (each >= axis), *rest) for each, *rest in windows))  # type: ignore[misc]
    if options["step"] != 1:
        return None
    start, whole = options["start"], options["length"] == source.shape[axis]
    if any(each == axis for each, _, _ in windows):
        return tuple((each, first + start * (each == axis), count) for each, first, count in windows)
    return ((axis, start, 1), *windows) if options["length"] == 1 and not whole else windows


def _permutation(operation: Operation, rank: int) -> list[int] | None:
    """For each axis of a permuted tensor the axis that it was before."""
    operands = list(operation.operands[1:]) + list(operation.options.values())
    axes = list(range(rank))
    if operation.kind in ("t", "mT", "numpy_T"):
        return [*axes[:-2], *reversed(axes[-2:])] if operation.kind != "numpy_T" else axes[::-1]
    if operation.kind == "permute":
        return [axis % rank for axis in operands[0]]
    if operation.kind in ("transpose", "swapaxes", "swapdims"):
        first, second = (axis % rank for axis in operands[:2])
        axes[first], axes[second] = second, first
        return axes
    moved = [[axis % rank for axis in ([each] if isinstance(each, int) else each)] for each in operands[:2]]
    rest = [axis for axis in axes if axis not in moved[0]]
    for destination, axis in sorted(zip(moved[1], moved[0], strict=True)):
        rest.insert(destination, axis)
    return rest


def _broadcast(shape: Sequence[int], source: Sequence[int], windows: Windows) -> Windows | None:
    """Where channels of a tensor of ``shape`` are in one that was broadcast to it; None if they are not apart there."""
    missing = len(shape) - len(source)
    if any(axis < missing or source[axis - missing] != shape[axis] for axis, _, _ in windows):
        return None
    return tuple((axis - missing, start, count) for axis, start, count in windows)


def _reshaped(shape: Sequence[int], source: Sequence[int], windows: Windows) -> Windows | None:
    """Where channels of a tensor of ``shape`` were before it had that shape; None if in no window.

    Both shapes are cut into the smallest runs of axes with equally many numbers, as [2, 16, 64] and [2, 4, 4, 64] into
    2 and 2, 16 and 4 x 4, 64 and 64. In each run the channels are a range of its numbers, or all have every number.
    """
    runs = _common_runs(shape, source)
    if runs is None:
        return None
    found = [window for window in windows if shape[window[0]] != 1]
    for after, before in runs:
        inside = [window for window in found if window[0] in after]
        if not inside:
            continue
        if {axis for axis in after if shape[axis] != 1} != {axis for axis, _, _ in inside}:
            return None  # these numbers are channels and something else
        counted = [window for window in inside if window[2] > 1]  # the order of the others is of no matter
        many = [window for window in found if window[2] > 1]
        place = many.index(counted[0]) if counted else 0
        if many[place : place + len(counted)] != sorted(counted):
            return None  # other channels lie between
        replaced = _as_windows(shape, source, sorted(inside), before)
        if replaced is None:
            return None
        place = found.index(counted[0] if counted else inside[0])
        # until all runs are through, negative axes mark the windows of the source
        marked = [(-1 - axis, start, count) for axis, start, count in replaced]
        found = [window for window in (*found[:place], *marked, *found[place:]) if window not in inside]
    return tuple((-1 - axis, start, count) for axis, start, count in found)


def _common_runs(a: Sequence[int], b: Sequence[int]) -> list[tuple[range, range]] | None:
    """The smallest runs of axes of two shapes with equally many numbers; None if these are not the same numbers."""
    runs, i, j = list[tuple[range, range]](), 0, 0
    while i < len(a) or j < len(b):
        first, second = i, j
        left, right = (a[i] if i < len(a) else 1), (b[j] if j < len(b) else 1)
        i, j = min(i + 1, len(a)), min(j + 1, len(b))
        while left != right:
            if left < right and i < len(a):
                left, i = left * a[i], i + 1
            elif right < left and j < len(b):
                right, j = right * b[j], j + 1
            else:
                return None
        runs.append((range(first, i), range(second, j)))
    return runs


def _as_windows(
    shape: Sequence[int], source: Sequence[int], inside: Sequence[tuple[int, int, int]], before: range
) -> list[tuple[int, int, int]] | None:
    """Windows on the axes of a run as windows on its axes ``before`` in ``source``: as a range of its numbers."""
    start, length, stride, partial = 0, 1, 1, False
    for axis, first, count in reversed(inside):
        if partial and count > 1:
            return None
        start, length, stride = start + first * stride, length * count, stride * shape[axis]
        partial = partial or count < shape[axis]
    found = []
    for axis in reversed(before):
        size = source[axis]
        if length >= size:
            if start % size or length % size:
                return None
            found.append((axis, 0, size))
            start, length = start // size, length // size
        else:
            if start % size + length > size:
                return None
            found.append((axis, start % size, length))
            start, length = start // size, 1
    return [window for window in reversed(found) if source[window[0]] != 1]
