"""MXFP8: blocks of 32 E4M3 numbers whose scale is a power of two (OCP Microscaling Formats 1.0).

    scale = 2^ceil(log2(max |block| / 448))

This scale is ModelOpt's, comfy-kitchen's and so ComfyUI's, and clips nothing. The specification's, which mxfp4 has,
would map a block's largest magnitude to 256..512 and clip what is beyond 448: a number of eight bits has precision
enough for its neighbours. The logarithm is taken in fp32 as theirs is, because ``frexp`` would choose the next scale
for a few numbers right above 448 times a power of two.

The scale is stored in fp16, as mxfp4's is. E8M0 has smaller ones, for blocks without a number of 448 * 2^-25 or more;
with fp16's smallest their codes are as precise down to 2^-30.
"""

import math

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, fp8
from sd_quant.quantization.formats.blocks import blocks, per_number
from sd_quant.quantization.formats.mxfp4 import LARGEST_EXPONENT, LOGARITHM_ERROR, SMALLEST_EXPONENT

BLOCK = FORMATS["mxfp8"].block


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """The power of two of every block, [..., n / 32]; ``amax`` is not used.

    Raises OverflowError when a number is infinite or NaN.
    """
    peak = blocks(x, BLOCK).abs().amax(-1).float()
    if not torch.isfinite(peak).all():
        raise OverflowError("a number that is infinite or NaN has no power of two above it")
    exponent = (peak / fp8.QMAX).log2().ceil().clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT)
    return (torch.ldexp(torch.ones_like(peak), exponent.int()),)


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
    """One candidate, because E4M3 is as precise with any other power of two."""
    return (scales(x, amax),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return fp8.quantize(x, per_number(scale, x.shape[-1]))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return fp8.dequantize(codes, per_number(scale, codes.shape[-1]))


def onnx_scale(apply, amax, global_scale: float):
    """``2^ceil(log2(amax / 448))``. Rounding to fp16 turns the nearly exact fp32 result into the power of two."""
    held = apply("Max", amax, fp8.QMAX * 2.0**SMALLEST_EXPONENT)
    logarithm = apply("Div", apply("Log", apply("Div", held, fp8.QMAX)), math.log(2))
    exponent = apply("Ceil", apply("Sub", logarithm, LOGARITHM_ERROR))
    return apply("Cast", apply("Exp", apply("Mul", exponent, math.log(2))), to="FLOAT16")
