"""Floating-point formats: FP8 E4M3 with one scale per tensor, channel or block, and the MX formats' blocks.

E4M3 (Micikevicius et al. 2022, OCP FP8 1.0) has four exponent and three mantissa bits, and no infinity. Down to
``amax`` * 2^-15 numbers have a relative precision of 2^-4, so outliers cost little and inputs need no smoothing; below
that the steps are equal, like an integer's. Magnitudes beyond 448 become 448, as in TensorRT and in ONNX with
``saturate``; they are clamped here, because torch does not do so in every version and on every device. Alternative not
taken: E5M2, which inference has no use for.

| format                | scale                                                                                  |
|-----------------------|----------------------------------------------------------------------------------------|
| fp8                   | ``amax / 448``, as in ModelOpt                                                         |
| fp8_128, fp8_128x128  | ``max |block| / 448`` in fp16: DeepSeek-V3's blocks (arXiv 2412.19437, 3.3); the last  |
|                       | blocks of a weight may have fewer rows                                                 |
| mxfp8                 | ``2^ceil(log2(max |block| / 448))``, as in ModelOpt and ComfyUI: it clips nothing      |
| mxfp4                 | ``2^(floor(log2(max |block|)) - 2)``, as specified (5.2, 6.3): it clips up to a        |
|                       | quarter of a block's largest number, which costs less than a bit of its other numbers  |

transformers' ``FineGrainedFP8`` stores scales of blocks in fp32. Rounding to three bits of mantissa costs the same at
any scale, so a block's own scale gains only numbers 2^15 times smaller than the largest, which underflow with one scale
for all. Powers of two are stored in fp16: ONNX has E8M0 only from opset 24 on, and TensorRT does not parse it. fp16's
exponents suffice for every number that was in fp16; with its smallest, MXFP8 is as precise as with E8M0 down to 2^-30.
"""

import math

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.blocks import PerBlock
from sd_quant.quantization.formats.integers import Proportional, scale_of

SMALLEST_EXPONENT, LARGEST_EXPONENT = -24, 15  # of fp16; E8M0 has -127 and 127
# More than the logarithm's rounding error, far less than the difference of two neighbouring fp16 numbers' logarithms.
LOGARITHM_ERROR = 1e-5


class E4M3:
    """FP8 E4M3 with one static scale per tensor or output channel."""

    QMAX = 448.0

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor]:
        return (scale_of(amax, self.QMAX),)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
        """Return ``scales`` as the only candidate, because E4M3 is about as precise with any other scale."""
        return (self.scales(x, amax),)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).clamp(-self.QMAX, self.QMAX).to(torch.float8_e4m3fn)

    def dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale


FP8 = E4M3()


class Mxfp4(PerBlock):
    def of_peak(self, peak: Tensor) -> Tensor:
        _, exponent = torch.frexp(finite(peak))  # peak = mantissa * 2^exponent with the mantissa in 1/2..1
        exponent = torch.where(peak == 0, SMALLEST_EXPONENT, exponent - 3).clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT)
        return torch.ldexp(torch.ones_like(peak), exponent)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
        """Return the specification's scale, and twice that scale, which clips nothing."""
        (scale,) = self.scales(x, amax)
        return (scale,), ((2 * scale).clamp(max=2.0**LARGEST_EXPONENT),)

    def onnx_scale(self, apply, amax, global_scale: float):
        """Add nodes for ``2^floor(log2(amax)) / 4``; the cast to fp16 rounds to the exact power of two."""
        logarithm = apply("Div", apply("Log", apply("Max", amax, 4 * 2.0**SMALLEST_EXPONENT)), math.log(2))
        exponent = apply("Floor", apply("Add", logarithm, LOGARITHM_ERROR))
        return apply("Cast", apply("Exp", apply("Mul", apply("Sub", exponent, 2.0), math.log(2))), to="FLOAT16")


class Mxfp8(PerBlock):
    def of_peak(self, peak: Tensor) -> Tensor:
        """Compute scales in fp32 like ModelOpt: ``frexp`` differs for a few numbers above 448 times a power of two."""
        exponent = (finite(peak) / FP8.QMAX).log2().ceil().clamp(SMALLEST_EXPONENT, LARGEST_EXPONENT)
        return torch.ldexp(torch.ones_like(peak), exponent.int())

    def onnx_scale(self, apply, amax, global_scale: float):
        """Add nodes for ``2^ceil(log2(amax / 448))``; the cast to fp16 rounds to the exact power of two."""
        held = apply("Max", amax, FP8.QMAX * 2.0**SMALLEST_EXPONENT)
        logarithm = apply("Div", apply("Log", apply("Div", held, FP8.QMAX)), math.log(2))
        exponent = apply("Ceil", apply("Sub", logarithm, LOGARITHM_ERROR))
        return apply("Cast", apply("Exp", apply("Mul", exponent, math.log(2))), to="FLOAT16")


def finite(peak: Tensor) -> Tensor:
    """Return ``peak`` unchanged. Raises OverflowError when a number in it is infinite or NaN."""
    if not torch.isfinite(peak).all():
        raise OverflowError("a number that is infinite or NaN has no power of two above it")
    return peak


MXFP4, MXFP8 = Mxfp4(e2m1, FORMATS["mxfp4"].block), Mxfp8(FP8, FORMATS["mxfp8"].block)
FP8_128, FP8_128X128 = (
    Proportional(FP8, FORMATS[name].block, FORMATS[name].block_rows) for name in ("fp8_128", "fp8_128x128")
)
