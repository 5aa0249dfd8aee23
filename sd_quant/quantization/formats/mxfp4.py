"""MXFP4: blocks of 32 E2M1 numbers whose scale is a power of two (OCP Microscaling Formats 1.0, 5.2 and 6.3).

    scale = 2^(floor(log2(max |block|)) - 2)        2 is the exponent of E2M1's largest number, 6 = 1.5 * 2^2

This scale is the specification's. It maps a block's largest magnitude to 4..8, and magnitudes beyond 6 become 6. A
scale that never clips would cost all other numbers of the block a bit. A block of zeros gets the smallest scale.

The specification stores the exponent in one byte, E8M0. ONNX has that type only from opset 24 on, and TensorRT does not
parse it, so the file stores the same powers of two in fp16: one more byte for 32 numbers. The exponents of fp16 suffice
for every number that was in fp16 before.
"""

import math

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.blocks import blocks, per_number

BLOCK = FORMATS["mxfp4"].block
SMALLEST_EXPONENT, LARGEST_EXPONENT = -24, 15  # of fp16; E8M0 has -127 and 127
# More than the logarithm's rounding error, far less than the difference of two neighbouring fp16 numbers' logarithms.
LOGARITHM_ERROR = 1e-5


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """The power of two of every block, [..., n / 32]; ``amax`` is not used.

    Raises OverflowError when a number is infinite or NaN.
    """
    peak = blocks(x, BLOCK).abs().amax(-1)
    if not torch.isfinite(peak).all():
        raise OverflowError("a number that is infinite or NaN has no power of two above it")
    _, exponent = torch.frexp(peak)  # peak = mantissa * 2^exponent with the mantissa in 1/2..1
    exponent = torch.where(peak == 0, SMALLEST_EXPONENT, exponent - 3).clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT)
    return (torch.ldexp(torch.ones_like(peak), exponent),)


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
    """The specification's scale, and twice that, which clips nothing."""
    (scale,) = scales(x, amax)
    return (scale,), ((2 * scale).clamp(max=2.0**LARGEST_EXPONENT),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return e2m1.encode(x.float() / per_number(scale, x.shape[-1]))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return e2m1.decode(codes) * per_number(scale, codes.shape[-1])


def onnx_scale(apply, amax, global_scale: float):
    """``2^floor(log2(amax)) / 4``. Rounding to fp16 turns the nearly exact fp32 result into the power of two."""
    logarithm = apply("Div", apply("Log", apply("Max", amax, 4 * 2.0**SMALLEST_EXPONENT)), math.log(2))
    exponent = apply("Floor", apply("Add", logarithm, LOGARITHM_ERROR))
    return apply("Cast", apply("Exp", apply("Mul", apply("Sub", exponent, 2.0), math.log(2))), to="FLOAT16")
