"""Translations of torch operations to ONNX for which torch's exporter would decompose the network.

Decomposing traces the whole network a second and a third time, half of the time of a trace; with these few translations
no family's denoiser needs it. A translation raises NotImplementedError for arguments that it does not support, and the
network is decomposed. The road not taken is to decompose always.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnxscript
import torch

aten = torch.ops.aten
op: Any = onnxscript.opset20  # its annotations want constants of a tensor's own type


def to(x, *args, dtype: int | None = None, **_):
    """``x.to``: only the dtype, given as ONNX's number, has a meaning in a graph."""
    numbers = [argument for argument in (*args, dtype) if isinstance(argument, int) and not isinstance(argument, bool)]
    return op.Cast(x, to=numbers[0]) if numbers else op.Identity(x)


def reversed_difference(x, number: float, alpha: float = 1):
    """``number - alpha * x``, in the dtype of ``x``."""
    factor = op.CastLike(op.Constant(value_float=float(alpha)), x)
    return op.Sub(op.CastLike(op.Constant(value_float=float(number)), x), op.Mul(x, factor))


def clip(x, min: float | None = None, max: float | None = None):
    ends = [None if end is None else op.CastLike(op.Constant(value_float=float(end)), x) for end in (min, max)]
    return op.Clip(x, *ends)


def flatten(x, start_dim: int = 0, end_dim: int = -1):
    """Some axes as one; the last ones without reading sizes at run time, as torch's own translation does."""
    first, last = start_dim % len(x.shape), end_dim % len(x.shape)
    kept = [0] * first + [-1]
    if last == len(x.shape) - 1:
        return op.Reshape(x, op.Constant(value_ints=kept))
    behind = op.Shape(x, start=last + 1)
    return op.Reshape(x, op.Concat(op.Constant(value_ints=kept), behind, axis=0))


def unflatten(x, dim: int, sizes: Sequence[int]):
    """The last axis as several, likewise."""
    if dim % len(x.shape) != len(x.shape) - 1 or not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError("an axis is unflattened that is not the last, or into sizes that are not known")
    return op.Reshape(x, op.Constant(value_ints=[0] * (len(x.shape) - 1) + list(sizes)))


def rms_norm(x, normalized_shape: Sequence[int], weight=None, eps: float | None = None):
    """``x`` over the root of its mean square, in fp32 as in torch, times the weight. ``eps`` defaults to fp32's."""
    number = torch.finfo(torch.float32).eps if eps is None else eps
    axes = op.Constant(value_ints=list(range(-len(normalized_shape), 0)))
    wide = op.Cast(x, to=1)
    mean = op.ReduceMean(op.Pow(wide, op.Constant(value_float=2.0)), axes, keepdims=1)
    normed = op.Mul(wide, op.Reciprocal(op.Sqrt(op.Add(mean, op.Constant(value_float=number)))))
    return op.CastLike(normed if weight is None else op.Mul(normed, op.Cast(weight, to=1)), x)


def both(x, y):
    """``x & y`` of truth values."""
    return op.And(x, y)


TRANSLATIONS: dict[Callable, Callable] = {
    getattr(aten, "__and__").Tensor: both,  # noqa: B009, a name that Python would mangle in a class
    aten.to.dtype: to,
    aten.to.device: to,
    aten.to.dtype_layout: to,
    aten.clip.default: clip,
    aten.flatten.using_ints: flatten,
    aten.rsub.Scalar: reversed_difference,
    aten.rms_norm.default: rms_norm,
    aten.unflatten.int: unflatten,
}
