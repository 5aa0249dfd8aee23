"""Symmetric integers: ``q = clamp(round(x / scale), -QMAX - 1, QMAX)``, ``scale = amax / QMAX``, zero point 0.

INT4 in blocks is the group quantization of ModelOpt and deepcompressor. With one scale per row it is coarser, for
rotated weights and inputs that are scaled per token (ConvRot, Huang et al. 2025; ComfyUI's ``convrot_w4a4``): a row
then takes one integer product, where blocks take a sum of products. The lowest code occurs only where a search or GPTQ
clips. Not taken: zero points, which TensorRT's INT4 does not have.

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
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a range, tried for a weight


def scale_of(amax: Tensor, qmax: float) -> Tensor:
    """``amax / qmax`` in fp32, exactly representable in fp16; 1 where ``amax`` is zero.

    Raises OverflowError when a scale does not fit fp16 or is NaN.
    """
    scale = unchecked_scale_of(amax, qmax)
    if not math.isfinite(scale.sum()):  # of no negative ones, so the sum is finite if all are
        raise OverflowError(f"an amax of {amax.max().item():g} gives a scale that fp16 cannot hold")
    return scale


def unchecked_scale_of(amax: Tensor, qmax: float) -> Tensor:
    """``scale_of``, infinite or NaN where it is not representable; no call waits for a GPU."""
    return torch.where(amax == 0, 1.0, (amax.float() / qmax).clamp(min=SMALLEST_SCALE)).half().float()


@dataclass(frozen=True)
class Integers:
    """Integers with one scale per range."""

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
    """A format whose scales map the largest magnitude of each block to the largest of its ``numbers``."""

    @property
    def QMAX(self) -> float:
        return self.numbers.QMAX

    def of_peak(self, peak: Tensor) -> Tensor:
        return scale_of(peak, self.QMAX)

    def unchecked_scales(self, x: Tensor) -> Tensor:
        """The one of ``scales``, infinite or NaN where it is not representable; no call waits for a GPU."""
        return unchecked_scale_of(self.peaks(x), self.QMAX)

    def onnx_scale(self, apply, amax, global_scale: float):
        """``max(amax / QMAX, SMALLEST_SCALE)`` in fp16. The codes of a block of zeros are zero with any scale."""
        return apply("Cast", apply("Max", apply("Div", amax, self.QMAX), SMALLEST_SCALE), to="FLOAT16")


INT8, INT4_PER_ROW = Integers(127.0), Integers(7.0)
INT4 = Proportional(INT4_PER_ROW, FORMATS["int4"].block, clips=CLIPS)
