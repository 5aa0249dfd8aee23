"""NVFP4: blocks of 16 E2M1 numbers with an E4M3 scale, and one fp32 scale for the whole tensor (NVIDIA's definition).

    global = amax / (6 * 448)        scale = E4M3(max |block| / 6 / global)        x = E2M1 * scale * global

The block with the tensor's largest magnitude gets the largest scale that E4M3 holds. TensorRT's ``FP4DynamicQuantize``
and ModelOpt's ``NVFP4QTensor`` compute the same with one exception: a scale that E4M3 would round to zero becomes
E4M3's smallest number here, so that a block of zeros is not divided by zero.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, e2m1, fp8
from sd_quant.quantization.formats.blocks import blocks, per_number

BLOCK = FORMATS["nvfp4"].block
SMALLEST_E4M3 = 2.0**-9
SMALLEST_PRODUCT = 2.0**-24  # of fp16, which holds no smaller positive number


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of every block, [..., n / 16] in E4M3 numbers, and the global scale [] from the largest ``amax``.

    Raises OverflowError when ``amax`` is infinite or NaN.
    """
    global_scale = global_scale_of(amax)
    return block_scales(x, global_scale, e2m1.LARGEST), global_scale


def global_scale_of(amax: Tensor) -> Tensor:
    """The scale [] that maps the largest ``amax`` to the largest product of a code and a block's scale."""
    peak = amax.float().max()
    if not torch.isfinite(peak):
        raise OverflowError(f"an amax of {peak.item():g} gives no scale")
    return torch.where(peak == 0, 1.0, peak / (e2m1.LARGEST * fp8.QMAX))


def block_scales(x: Tensor, global_scale: Tensor, code: float) -> Tensor:
    """The E4M3 scale of every block that maps the block's largest number to ``code``."""
    return in_e4m3(blocks(x, BLOCK).abs().amax(-1) / code / global_scale)


def with_global_scale(scale: Tensor, global_scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks' ``scale`` in steps of the global scale of another ``amax``, at most 1/16 away unless it is larger."""
    other = global_scale_of(amax)
    return in_e4m3(scale * (global_scale / other)), other


def in_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(SMALLEST_E4M3, fp8.QMAX).to(torch.float8_e4m3fn).float()


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Scales that map a block's largest number to 6, or to 4, the next smaller code."""
    six, global_scale = scales(x, amax)
    return (six, global_scale), (block_scales(x, global_scale, 4.0), global_scale)


def scale_per_number(scale: Tensor, global_scale: Tensor, numbers: int) -> Tensor:
    """The product of both scales for each of ``numbers`` along the last axis, rounded to fp16 as in the graph."""
    return per_number((scale * global_scale).half().float(), numbers)


def quantize(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return e2m1.encode(x.float() / scale_per_number(scale, global_scale, x.shape[-1]).clamp(min=SMALLEST_PRODUCT))


def dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return e2m1.decode(codes) * scale_per_number(scale, global_scale, codes.shape[-1])


def onnx_scale(apply, amax, global_scale: float):
    """``amax / 6`` in E4M3 steps of ``global_scale``, in fp16."""
    wanted = apply("Max", apply("Div", amax, e2m1.LARGEST), SMALLEST_E4M3 * global_scale)
    codes = apply("QuantizeLinear", wanted, global_scale, output_dtype="FLOAT8E4M3FN")
    return apply("DequantizeLinear", codes, global_scale, output_dtype="FLOAT16")
