"""Translations of torch operations to ONNX for which torch's exporter would decompose the network.

Decomposing traces the network twice more, which takes half of the time of a trace. With these translations no network
of a supported family is decomposed, and few networks of other pipelines are. A translation raises NotImplementedError
for arguments that it does not support; then the network is decomposed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype

aten = torch.ops.aten
op: Any = onnxscript.opset20  # its annotations want constants of a tensor's own type


def to(x, *args, dtype: int | None = None, **_):
    """``Tensor.to``: in a graph only the dtype matters, given as ONNX's number for it."""
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
    """``torch.flatten``; if the last axes are flattened, no sizes are read at run time."""
    first, last = start_dim % len(x.shape), end_dim % len(x.shape)
    kept = [0] * first + [-1]
    if last == len(x.shape) - 1:
        return op.Reshape(x, op.Constant(value_ints=kept))
    behind = op.Shape(x, start=last + 1)
    return op.Reshape(x, op.Concat(op.Constant(value_ints=kept), behind, axis=0))


def unflatten(x, dim: int, sizes: Sequence[int]):
    """``torch.unflatten`` of the last axis to known sizes, without reading sizes at run time."""
    if dim % len(x.shape) != len(x.shape) - 1 or not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError("an axis is unflattened that is not the last, or into sizes that are not known")
    return op.Reshape(x, op.Constant(value_ints=[0] * (len(x.shape) - 1) + list(sizes)))


def rms_norm(x, normalized_shape: Sequence[int], weight=None, eps: float | None = None):
    """``x / sqrt(mean(x^2) + eps) * weight`` in fp32, as torch computes it. ``eps`` defaults to fp32's epsilon."""
    number = torch.finfo(torch.float32).eps if eps is None else eps
    axes = op.Constant(value_ints=list(range(-len(normalized_shape), 0)))
    wide = op.Cast(x, to=1)
    mean = op.ReduceMean(op.Pow(wide, op.Constant(value_float=2.0)), axes, keepdims=1)
    normed = op.Mul(wide, op.Reciprocal(op.Sqrt(op.Add(mean, op.Constant(value_float=number)))))
    return op.CastLike(normed if weight is None else op.Mul(normed, op.Cast(weight, to=1)), x)


def both(x, y):
    return op.And(x, y)


def promoted(*tensors):
    """Cast tensors to the common dtype to which torch promotes them."""
    examples = [torch.empty([1] * len(each.shape), dtype=to_torch_dtype(each.dtype), device="meta") for each in tensors]
    dtype = from_torch_dtype(torch.result_type(*examples))
    return [each if each.dtype == dtype else op.Cast(each, to=dtype) for each in tensors]


def minimum(x, y):
    """``torch.minimum``: elementwise, And for booleans."""
    return op.And(x, y) if x.dtype == y.dtype == ir.DataType.BOOL else op.Min(*promoted(x, y))


def outer(x, y):
    x, y = promoted(x, y)
    return op.Mul(op.Unsqueeze(x, op.Constant(value_ints=[1])), y)


def meshgrid(tensors: Sequence, indexing: str = "xy"):
    """``torch.meshgrid``: expand each vector along the axes of all other vectors."""
    axes = list(range(len(tensors)))
    if indexing == "xy" and len(axes) > 1:
        axes[:2] = 1, 0
    lengths = op.Concat(*(op.Shape(tensors[axis]) for axis in axes), axis=0)
    places = [[other for other in range(len(axes)) if other != axis] for axis in axes]
    return op.SequenceConstruct(*(
        op.Expand(op.Unsqueeze(each, op.Constant(value_ints=place)) if place else each, lengths)
        for each, place in zip(tensors, places, strict=True)
    ))  # fmt: skip


def difference(x, n: int = 1, dim: int = -1, prepend=None, append=None):
    """``torch.diff``: the differences of neighbours along an axis, computed ``n`` times over."""
    given = [each for each in (prepend, x, append) if each is not None]
    x = op.Concat(*given, axis=dim) if len(given) > 1 else x
    for _ in range(n):
        first, second, last, end, axis = (op.Constant(value_ints=[each]) for each in (0, 1, -1, 2**63 - 1, dim))
        x = op.Sub(op.Slice(x, second, end, axis), op.Slice(x, first, last, axis))
    return x


def movedim(x, source: int, destination: int):
    axes = list(range(len(x.shape)))
    axes.insert(destination % len(axes), axes.pop(source % len(axes)))
    return op.Transpose(x, perm=axes)


def upsample_nearest(x, output_size: Sequence | None = None, scale_factors: Sequence[float] | None = None):
    """Nearest-exact interpolation: each output pixel is the input pixel nearest to its centre."""
    scales = sizes = None
    if output_size is None:
        scales = op.Constant(value_floats=[1.0, 1.0, *map(float, scale_factors or ())])
    else:
        one = op.Constant(value_ints=[1])
        known = [op.Constant(value_ints=[size]) if isinstance(size, int) else op.Reshape(size, one)
                 for size in output_size]  # fmt: skip
        sizes = op.Concat(op.Shape(x, end=2), *known, axis=0)
    return op.Resize(
        x, None, scales, sizes, mode="nearest",
        coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil",
    )  # fmt: skip


def conv_transpose2d(
    x, weight, bias=None, stride=(1, 1), padding=(0, 0), output_padding=(0, 0), groups: int = 1, dilation=(1, 1)
):
    return op.ConvTranspose(
        x, weight, *([] if bias is None else [bias]), strides=list(stride), pads=[*padding, *padding],
        output_padding=list(output_padding), group=groups, dilations=list(dilation),
    )  # fmt: skip


TRANSLATIONS: dict[Callable, Callable] = {
    getattr(aten, "__and__").Tensor: both,  # noqa: B009, a name that Python would mangle in a class
    aten.to.dtype: to,
    aten.to.device: to,
    aten.to.dtype_layout: to,
    aten._upsample_nearest_exact2d.vec: upsample_nearest,
    aten.clip.default: clip,
    aten.conv_transpose2d.input: conv_transpose2d,
    aten.diff.default: difference,
    aten.flatten.using_ints: flatten,
    aten.meshgrid.indexing: meshgrid,
    aten.min.other: minimum,
    aten.movedim.int: movedim,
    aten.outer.default: outer,
    aten.rsub.Scalar: reversed_difference,
    aten.rms_norm.default: rms_norm,
    aten.unflatten.int: unflatten,
}
