"""INT4 weights for INT8 kernels: code times block scale, rounded to an INT8 integer, times the scale of the row.

    x = clamp(round(relative * q), -127, 127) * scale      relative E4M3, one per 16 numbers; scale fp32, one per row

A kernel reads four bits and multiplies INT8, with inputs in INT8: ComfyUI's ``asym_w4a8_int8`` (comfy-kitchen's
``backends/eager/w4a8_int8.py``), which stores these codes plus 8 and rotates weights and inputs. Alternatives not
taken: its code book of 16 levels for Gaussian numbers instead of -8..7, stored for every layer, and its six-bit codes.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import blocks, per_number
from sd_quant.quantization.formats.integers import CLIPS, INT4

BLOCK = FORMATS["int4_in_int8"].block
QMAX, LARGEST = INT4.QMAX, 127.0


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative scale of each block [..., n / 16] and the scale of each row [..., 1]; ``amax`` is unused."""
    return tried_scales(x, amax)[0]


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    largest = blocks(x, BLOCK).abs().amax(-1)
    row = largest.amax(-1, keepdim=True)
    if not row.isfinite().all():
        raise OverflowError(f"an amax of {row.max().item():g} gives a scale that is not finite")
    scale = torch.where(row == 0, 1.0, (row / LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    relative = largest / scale / QMAX
    return tuple(((clip * relative).to(torch.float8_e4m3fn).float(), scale) for clip in CLIPS)


def quantize(x: Tensor, relative: Tensor, scale: Tensor) -> Tensor:
    """Quantize ``x`` to int8 codes: of a number's two neighbours, choose the nearer one after rounding to INT8."""
    wanted, step = x.float() / scale, per_number(relative, x.shape[-1])
    below = torch.where(step == 0, 0.0, wanted / step).floor()
    low, high = (code.clamp(-QMAX - 1, QMAX) for code in (below, below + 1))
    nearer = (on_grid(high * step) - wanted).abs() < (on_grid(low * step) - wanted).abs()
    return torch.where(nearer, high, low).to(torch.int8)


def dequantize(codes: Tensor, relative: Tensor, scale: Tensor) -> Tensor:
    return on_grid(codes.float() * per_number(relative, codes.shape[-1])) * scale


def on_grid(levels: Tensor) -> Tensor:
    return levels.round().clamp(-LARGEST, LARGEST)
