"""Tracing with pairs of real tensors for complex numbers, and fp32 for fp64: the runtimes support neither type.

Rotary embeddings multiply complex numbers. In ``RealNumbers`` torch's functions return a ``Pair`` where they would
return a complex tensor, and compute with real and imaginary parts, so that the network's own code stays as it is.
Alternative not taken: a rewritten rotary embedding for each network.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Operations that are the same for the real and for the imaginary parts. Most only move numbers.
MOVES = {
    *("__getitem__", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "detach", "expand", "expand_as"),
    *("flatten", "flip", "gather", "index_select", "masked_select", "movedim", "narrow", "permute", "repeat"),
    *("repeat_interleave", "reshape", "reshape_as", "roll", "select", "split", "squeeze", "stack", "swapaxes", "tile"),
    *("split_with_sizes", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    *("__setitem__", "empty_like", "neg", "__neg__", "new_empty", "new_zeros", "pad", "pad_sequence", "sum", "mean"),
    *("where", "zeros_like"),
}
TO = {"to", "cpu", "cuda", "type_as", "cfloat", "type"}
SUMS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
DIFFERENCES = {"sub", "subtract", "__sub__", "__isub__", "sub_"}
PRODUCTS = {"mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"}
QUOTIENTS = {"div", "divide", "true_divide", "__truediv__", "__itruediv__"}
MADE = {"zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty"}
NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class Pair:
    """A complex tensor as its real and its imaginary part, two tensors of one shape."""

    dtype, requires_grad = torch.complex64, False

    def __init__(self, real: Tensor, imag: Tensor):
        self.real, self.imag = real, imag

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        return computed(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Return a method of Tensor that computes with the pair, or an attribute that both of its parts share."""
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.real, name)
        if not callable(found) or name in ("size", "dim", "numel"):
            return found
        return lambda *args, **kwargs: computed(getattr(Tensor, name), (self, *args), kwargs)

    def is_complex(self) -> bool:
        return True

    def is_floating_point(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: Any) -> "Pair":
        return Pair(self.real[index], self.imag[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.real[index], self.imag[index] = value.real, imag_of(value)

    def __mul__(self, other: Any) -> "Pair":
        if not isinstance(other, Pair | complex):
            return Pair(self.real * other, self.imag * other)
        real = self.real * other.real - self.imag * other.imag
        return Pair(real, self.real * other.imag + self.imag * other.real)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Pair":
        return Pair(self.real / other, self.imag / other)

    def __add__(self, other: Any) -> "Pair":
        return Pair(self.real + other.real, self.imag + imag_of(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pair":
        return Pair(self.real - other.real, self.imag - imag_of(other))

    def __neg__(self) -> "Pair":
        return Pair(-self.real, -self.imag)

    def conj(self) -> "Pair":
        return Pair(self.real, -self.imag)

    def abs(self) -> Tensor:
        return (self.real**2 + self.imag**2).sqrt()


def imag_of(value: Any) -> Any:
    """Return the imaginary part of a value; 0 for a real tensor."""
    return 0 if isinstance(value, Tensor) else value.imag


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each leaf of nested lists, tuples and dictionaries, and return the result."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        values = [mapped(each, change) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    return change(value)


def computed(func: Callable, args: Sequence, kwargs: Mapping) -> Any:
    """Compute torch's ``func`` for arguments that contain a ``Pair``.

    Raises NotImplementedError for a function without a form for pairs.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute, such as Tensor.real
        return getattr(args[0], func.__self__.__name__)
    if name == "view_as_real":
        return torch.stack([args[0].real, args[0].imag], dim=-1)
    if name in PRODUCTS:
        return args[0] * args[1] if isinstance(args[0], Pair) else args[1] * args[0]
    if name in SUMS:
        return args[0] + args[1] if isinstance(args[0], Pair) else args[1] + args[0]
    if name in DIFFERENCES and isinstance(args[0], Pair):
        return args[0] - args[1]
    if name in QUOTIENTS and isinstance(args[0], Pair):
        return args[0] / args[1]
    if name in ("real", "imag", "conj", "abs", "is_complex", "is_floating_point"):
        found = getattr(args[0], name)
        return found() if callable(found) else found
    if name in TO:
        return args[0]
    if name not in MOVES:
        raise NotImplementedError(f"torch's {name or func} has no form for complex numbers as pairs of reals")

    def by(part: Callable[[Pair], Tensor]) -> Any:
        own, named = mapped((tuple(args), dict(kwargs)), lambda each: part(each) if isinstance(each, Pair) else each)
        return func(*own, **named)

    parts = by(lambda pair: pair.real), by(lambda pair: pair.imag)
    if parts[0] is None or isinstance(parts[0], Tensor):
        return None if parts[0] is None else Pair(*parts)
    return type(parts[0])(Pair(*each) for each in zip(*parts, strict=True))


class RealNumbers(TorchFunctionMode):
    """Torch function mode in which a ``Pair`` takes the place of each complex tensor, and fp32 that of fp64."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        args, kwargs = mapped((tuple(args), dict(kwargs or {})), real)
        if name == "view_as_complex":
            return Pair(args[0][..., 0], args[0][..., 1])
        if name == "complex":
            return Pair(*args, **kwargs)
        if name == "polar":
            return Pair(args[0] * torch.cos(args[1]), args[0] * torch.sin(args[1]))
        if name == "double":
            return args[0].float()
        if name == "linspace" and isinstance(kwargs.get("steps", args[-1]), torch.SymInt):
            return evenly_spaced(*args, **kwargs)
        if any(isinstance(each, Pair) for each in flat((args, kwargs))):
            return computed(func, args, kwargs)
        if kwargs.get("dtype") is torch.complex64 and name in MADE:
            made = func(*args, **(kwargs | {"dtype": torch.float32}))
            return Pair(made, torch.zeros_like(made))
        if any(each is torch.complex64 for each in flat((args, kwargs))) and name in ("to", "type"):
            return Pair(args[0], torch.zeros_like(args[0]))
        return func(*args, **kwargs)


def evenly_spaced(start: Any, end: Any, steps: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Compute ``torch.linspace`` for a dynamic number of steps, which torch's exporter would make a constant."""
    places = torch.arange(steps, dtype=torch.float32, device=device)
    return (start + places * ((end - start) / (steps - 1))).to(dtype or torch.float32)


class Numbers(TorchFunctionMode):
    """Torch function mode that notes if a network has complex numbers, or anything that ``RealNumbers`` changes."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = self.changed = False

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in flat(result) if isinstance(each, Tensor)]
        self.complex |= any(each.is_complex() for each in tensors)
        wide = getattr(func, "__name__", "") == "linspace" or any(each.dtype in NARROWER for each in tensors)
        self.changed |= self.complex or wide
        return result


def flat(value: Any) -> list[Any]:
    """Return the leaves of a nested value."""
    found: list[Any] = []
    mapped(value, found.append)
    return found


def real(value: Any) -> Any:
    """Convert a complex tensor to a ``Pair``, fp64 to fp32, and dtypes likewise; return any other value unchanged."""
    if isinstance(value, torch.dtype):
        return NARROWER.get(value, value)
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return Pair(value.real.float().contiguous(), value.imag.float().contiguous())
    return value.float() if value.dtype == torch.float64 else value


def with_real_constants(network: nn.Module) -> nn.Module:
    """Replace the complex and fp64 tensors among a network's buffers and attributes, in place. Returns the network."""
    for module in network.modules():
        for name, buffer in list(module._buffers.items()):
            changed = real(buffer)
            if isinstance(changed, Pair):
                del module._buffers[name]
                object.__setattr__(module, name, changed)
            elif changed is not buffer:
                module._buffers[name] = changed
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and any(isinstance(each, Tensor) for each in flat(value)):
                object.__setattr__(module, name, mapped(value, real))
    return network
