"""Symmetric integers: ``q = clamp(round(x / scale), -QMAX - 1, QMAX)``, ``scale = amax / QMAX``, zero point 0.

INT4 in blocks is the group quantization of ModelOpt and deepcompressor. INT4 with one scale per row is coarser; it is
for rotated weights and inputs scaled per token (ConvRot, Huang et al. 2025; ComfyUI's ``convrot_w4a4``): a row needs
one integer product, with blocks a sum of scaled products. The lowest code occurs only where a search or GPTQ clips.
Alternative not taken: zero points, which TensorRT's INT4 does not have.

A scale is rounded to fp16 *before* anything is quantized with it, because the graph stores it in fp16. So simulation,
stored weights and engine use the same number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import PerBlock

SMALLEST_SCALE = 2.0**-20  # smaller ones have few bits in fp16, or are zero; weights this small do not matter
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # fractions of a range that a search tries for a weight


def scale_of(amax: Tensor, qmax: float) -> Tensor:
    """Return the scale ``amax / qmax``, rounded to fp16 and returned in fp32; 1 where ``amax`` is zero.

    Raises OverflowError when a scale does not fit fp16 or is NaN.
    """
    scale = torch.where(amax == 0, 1.0, (amax.float() / qmax).clamp(min=SMALLEST_SCALE)).half().float()
    if not math.isfinite(scale.sum()):  # of no negative ones, so the sum is finite if all are
        raise OverflowError(f"an amax of {amax.max().item():g} gives a scale that fp16 cannot hold")
    return scale


@dataclass(frozen=True)
class Integers:
    """Symmetric integers -QMAX - 1 .. QMAX with one static scale per tensor or output channel."""

    QMAX: float

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor]:
        return (scale_of(amax, self.QMAX),)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
        return tuple(self.scales(x, clip * amax) for clip in CLIPS)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale).round_().clamp_(-self.QMAX - 1, self.QMAX).to(torch.int8)

    def dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale


class Proportional(PerBlock):
    """A format with one fp16 scale per block, which maps the block's largest magnitude to the largest code, QMAX."""

    @property
    def QMAX(self) -> float:
        return self.numbers.QMAX

    def of_peak(self, peak: Tensor) -> Tensor:
        return scale_of(peak, self.QMAX)

    def onnx_scale(self, apply, amax, global_scale: float):
        """Add nodes for ``max(amax / QMAX, SMALLEST_SCALE)`` in fp16. Blocks of zeros have zero codes at any scale."""
        return apply("Cast", apply("Max", apply("Div", amax, self.QMAX), SMALLEST_SCALE), to="FLOAT16")


INT8, INT4_PER_ROW = Integers(127.0), Integers(7.0)
INT4 = Proportional(INT4_PER_ROW, FORMATS["int4"].block, clips=CLIPS)
