"""FP8 E4M3 in blocks: inputs with a scale for 128 numbers of a row, weights with one for 128 x 128 numbers.

    scale = max |block| / 448

These are the blocks of DeepSeek-V3 (arXiv 2412.19437, section 3.3), of transformers' ``FineGrainedFP8`` and of the
servers that load its files. A weight's last blocks may have fewer rows, but no fewer columns, because a kernel takes
128 inputs at a time. Scales are rounded to fp16, which graphs store, where those libraries have fp32.

Rounding to three bits of mantissa costs the same at any scale, so a block's own scale gains only what one scale for all
lets underflow: numbers 2^15 times smaller than the largest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, fp8, int8
from sd_quant.quantization.formats.blocks import blocks, per_number


@dataclass(frozen=True)
class Fp8Blocks:
    """E4M3 in blocks of ``columns`` numbers along the last axis, with a scale for ``rows`` of them."""

    columns: int
    rows: int

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor]:
        """The scale of every block, [..., n / columns], the same for the ``rows`` that share it; ``amax`` is not used.

        Raises OverflowError when a scale does not fit fp16 or is NaN.
        """
        return (int8.scale_of(self.peaks(x), fp8.QMAX),)

    def unchecked_scales(self, x: Tensor) -> Tensor:
        """``scales``, infinite or NaN where they are not representable; no call waits for a GPU."""
        return int8.unchecked_scale_of(self.peaks(x), fp8.QMAX)

    def peaks(self, x: Tensor) -> Tensor:
        """The largest magnitude of the numbers that share each block's scale, [..., n / columns]."""
        peak = blocks(x, self.columns).abs().amax(-1)
        if self.rows > 1:
            groups = [group.amax(0, keepdim=True).expand_as(group) for group in peak.split(self.rows)]
            peak = torch.cat(groups)
        return peak

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
        """One candidate, because E4M3 is about as precise with any other scale."""
        return (self.scales(x, amax),)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        return fp8.quantize(x, per_number(scale, x.shape[-1]))

    def dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return fp8.dequantize(codes, per_number(scale, codes.shape[-1]))

    def onnx_scale(self, apply, amax, global_scale: float):
        """``amax / 448`` in fp16. A block of zeros has the smallest scale, with which its codes are zero too."""
        return apply("Cast", apply("Max", apply("Div", amax, fp8.QMAX), int8.SMALLEST_SCALE), to="FLOAT16")


FP8_128, FP8_128X128 = (Fp8Blocks(FORMATS[name].block, FORMATS[name].block_rows) for name in ("fp8_128", "fp8_128x128"))
