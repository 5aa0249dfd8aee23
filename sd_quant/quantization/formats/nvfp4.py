"""NVFP4: blocks of 16 E2M1 numbers with an E4M3 scale, and one fp32 scale for the whole tensor (NVIDIA's definition).

    global = amax / (6 * 448)        scale = E4M3(max |block| / 6 / global)        x = E2M1 * scale * global

TensorRT's ``FP4DynamicQuantize`` and ModelOpt's ``NVFP4QTensor`` compute the same, except for a scale that E4M3 would
round to zero: here it becomes E4M3's smallest number, so that a block of zeros is not divided by zero.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.blocks import blocks, per_number
from sd_quant.quantization.formats.floats import FP8

BLOCK = FORMATS["nvfp4"].block
SMALLEST_E4M3 = 2.0**-9
SMALLEST_PRODUCT = 2.0**-24  # of fp16, which holds no smaller positive number


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's E4M3 scale [..., n / 16] and the global scale []. Raises OverflowError if ``amax`` is inf."""
    common = global_scale(amax)
    return block_scales(x, common, e2m1.LARGEST), common


def global_scale(amax: Tensor) -> Tensor:
    """Return the global scale [] of a tensor from the largest ``amax``. Raises OverflowError if it is not finite."""
    peak = amax.float().max()
    if not torch.isfinite(peak):
        raise OverflowError(f"an amax of {peak.item():g} gives no scale")
    return torch.where(peak == 0, 1.0, peak / (e2m1.LARGEST * FP8.QMAX))


def rebased(scale: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Convert block scales from global scale ``old`` to ``new``, rounding to E4M3 again; return both new scales."""
    return (scale * (old / new)).clamp(SMALLEST_E4M3, FP8.QMAX).to(torch.float8_e4m3fn).float(), new


def block_scales(x: Tensor, common: Tensor, code: float) -> Tensor:
    """Return the E4M3 scales that map each block's largest magnitude to ``code``; ``common`` is the global scale."""
    wanted = blocks(x, BLOCK).abs().amax(-1) / code / common
    return wanted.clamp(SMALLEST_E4M3, FP8.QMAX).to(torch.float8_e4m3fn).float()


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return two candidates: scales that map a block's largest magnitude to 6, or to 4, the next smaller number."""
    six, common = scales(x, amax)
    return (six, common), (block_scales(x, common, 4.0), common)


def scale_per_number(scale: Tensor, global_scale: Tensor, numbers: int) -> Tensor:
    """Return block scale times global scale, rounded to fp16 as in the graph, for each of ``numbers`` per row."""
    return per_number((scale * global_scale).half().float(), numbers)


def quantize(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return e2m1.quantize(x, scale_per_number(scale, global_scale, x.shape[-1]).clamp(min=SMALLEST_PRODUCT))


def dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return e2m1.dequantize(codes, scale_per_number(scale, global_scale, codes.shape[-1]))


def onnx_scale(apply, amax, global_scale: float):
    """Add nodes for E4M3(``amax`` / 6 / ``global_scale``) * ``global_scale`` in fp16."""
    wanted = apply("Max", apply("Div", amax, e2m1.LARGEST), SMALLEST_E4M3 * global_scale)
    codes = apply("QuantizeLinear", wanted, global_scale, output_dtype="FLOAT8E4M3FN")
    return apply("DequantizeLinear", codes, global_scale, output_dtype="FLOAT16")
