"""NVIDIA ModelOpt's quantizers of weights and inputs, by the properties that ``modelopt_state.pth`` has.

The formulas are those of ``modelopt.torch.quantization.tensor_quant`` (0.47) in fp32: ``_tensor_quant`` for integers,
``_fp8_eager`` for E4M3, and ``NVFP4QTensor`` for NVFP4, whose own fake quantization needs a GPU. A range is ``amax``,
the largest magnitude; where none is stored it is found each time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.checks import listing
from sd_quant.interchange.inputs import LARGEST_FP8, Nvfp4
from sd_quant.interchange.stored import FP8, told
from sd_quant.quantization.formats import e2m1

NVFP4 = "nvfp4"
NVFP4_BLOCKS = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
NVFP4_RANGE = e2m1.LARGEST * LARGEST_FP8  # of all numbers, where its global scale is 1
SMALLEST = 2.0**-24  # of a range that ModelOpt divides by
LARGEST_BLOCK = 2**16
# Properties without an effect here: how ranges were found, how gradients pass, how ONNX is written, shapes that follow
WITHOUT_EFFECT = {
    "_dynamic", "_learn_amax", "_trt_high_precision_dtype", "_effective_bits", "_pass_through_bwd", "_if_calib",
    "_input_dtype", "_enable_pre_quant_scale", "_pytorch_state_metadata", "_amax_for_smoothing", "_quant_max_bound",
    "_amax_shape_for_export", "_slices", "_padding", "_original_shape", "_block_reshape_size", "backend_extra_args",
    "_is_static_block_scale_quantizer", "_bias_axis",
}  # fmt: skip
READ = {
    "_num_bits", "_axis", "_block_sizes", "_narrow_range", "_bias", "_disabled", "_if_quant", "_fake_quant",
    "_dequantize",
}  # fmt: skip


@dataclass(frozen=True)
class Quantizer:
    """``format`` is int2 to int8, FP8 or NVFP4; ranges differ along ``axes``, or by ``block`` of the last axis."""

    format: str
    axes: tuple[int, ...] = ()
    block: int | None = None
    narrow: bool = False  # without the smallest of an integer's codes
    biased: bool = False

    @property
    def bits(self) -> int:
        return int(self.format.removeprefix("int"))

    def __call__(self, x: Tensor, amax: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """``x`` rounded, in its own dtype. A stored ``amax`` broadcasts to ``x``, or has a row for each block."""
        given = x if bias is None else x - bias.to(x)
        if amax is None:
            others = [axis for axis in range(x.ndim) if axis not in {each % x.ndim for each in self.axes}]
            amax = given.abs().amax(others, keepdim=True) if others else given.abs()
        amax = amax.float().to(x.device)
        rounded = FORMULAS.get(self.format, integer)(self, given, amax)
        return rounded if bias is None else rounded + bias.to(x)


def integer(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    if quantizer.block is not None:
        width = x.shape[-1]
        padded = F.pad(x, (0, -width % quantizer.block))
        rounded = whole_integer(quantizer, padded.reshape(-1, quantizer.block), amax)
        return rounded.view(padded.shape)[..., :width]
    return whole_integer(quantizer, x, amax)


def whole_integer(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    high = 2 ** (quantizer.bits - 1) - 1
    low = -high if quantizer.narrow else -high - 1
    none = amax <= SMALLEST
    scale = torch.tensor(float(high), device=x.device) / amax
    codes = (x.float() * scale.masked_fill(none, 0)).round().clamp(low, high)
    return (codes / scale.masked_fill(none, 1)).to(x)


def fp8(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    scale = LARGEST_FP8 / torch.where(amax <= SMALLEST, torch.ones_like(amax), amax)
    codes = (x.float() * scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return (codes.float() * (1 / scale)).to(x)


def in_nvfp4(quantizer: Quantizer, x: Tensor, amax: Tensor) -> Tensor:
    peak = amax.max()
    return Nvfp4(float(torch.where(peak == 0, torch.ones_like(peak), peak / NVFP4_RANGE)))(x)


FORMULAS = {FP8: fp8, NVFP4: in_nvfp4}


@dataclass(frozen=True)
class Ranged:
    """A layer's input by ModelOpt's quantizer, with the range and the shift that are stored, if any."""

    quantizer: Quantizer
    amax: Tensor | None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.quantizer(x, self.amax, self.bias)

    def __str__(self) -> str:
        shift = "" if self.bias is None else " and a shift"
        if self.quantizer.format == NVFP4:
            return f"nvfp4, a scale for 16 numbers{shift}"
        return f"{self.quantizer.format}, {'one scale' if self.amax is not None else 'a scale each time'}{shift}"


def quantizer_of(path: Path, name: str, properties: Mapping[str, object]) -> Quantizer | None:
    """None for one that is switched off. Raises ArtifactError for what it does beside rounding as above."""
    if properties.get("_disabled") is True or properties.get("_if_quant") is False:
        return None
    more = [key for key in properties if key not in WITHOUT_EFFECT | READ and is_set(properties[key])]
    if more:
        raise ArtifactError(
            f"{path}: ModelOpt's {listing([name])} has {listing(more)}, which is not understood; give a checkpoint "
            "without"
        )
    advice = (
        "expected INT2 to INT8, FP8 or NVFP4 with one range, one for a row or one for a block; give such a checkpoint"
    )
    with refusing(f"{path}: ModelOpt's {listing([name])} has other properties", ValueError, TypeError, advice=advice):
        return understood(properties)


def is_set(value: object) -> bool:
    return not (value is None or value is False or value == {} or value == "")


def understood(properties: Mapping[str, object]) -> Quantizer:
    """Raises ValueError or TypeError for other properties than ``Quantizer`` has."""
    bits, blocks = properties.get("_num_bits"), properties.get("_block_sizes")
    bias, narrow = properties.get("_bias"), properties.get("_narrow_range", False)
    axis = properties.get("_axis")
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if len(axes) > 4 or not all(type(each) is int and -4 <= each < 4 for each in axes) or not isinstance(narrow, bool):
        raise ValueError("another axis or range of codes")
    if bias is not None and (not isinstance(bias, dict) or bias.get("type") != "static"):
        raise ValueError("a bias that is not static")
    plain = Quantizer("", axes, None, narrow, bias is not None)
    if type(bits) is int and 2 <= bits <= 8:
        return replace(plain, format=f"int{bits}", block=None if blocks is None else static_block(blocks))
    if bits == (4, 3) and blocks is None:
        return replace(plain, format=FP8)
    if bits == (2, 1) and blocks == NVFP4_BLOCKS:
        return replace(plain, format=NVFP4, block=16)
    raise ValueError(f"num_bits {told(bits)} and block_sizes {told(blocks)}")


def static_block(blocks: object) -> int:
    """The size of blocks along the last axis. Raises ValueError for others."""
    along_last = isinstance(blocks, dict) and blocks.keys() <= {-1, "type"}
    if not isinstance(blocks, dict) or not along_last or blocks.get("type") not in (None, "static"):
        raise ValueError(f"block_sizes {told(blocks)}")
    if type(blocks.get(-1)) is not int or not 2 <= blocks[-1] <= LARGEST_BLOCK:
        raise ValueError("another size of blocks")
    return blocks[-1]
