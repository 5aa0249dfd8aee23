"""Symmetric INT4 with one scale for each output of a weight: ``q = clamp(round(x / scale), -8, 7)``, ``amax / 7``.

It is coarser than blocks, and so meant for rotated weights and for inputs that are scaled per token: ConvRot (Huang et
al. 2025), and ComfyUI's ``convrot_w4a4``. Multiplying codes takes one integer product of a whole row then, where blocks
take a sum of products for each. The code -8 occurs only where a search or GPTQ clips.
"""

from torch import Tensor

from sd_quant.quantization.formats import int4, int8

QMAX = int4.QMAX
dequantize = int8.dequantize


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """``amax / 7``, exactly representable in fp16; ``x`` is not used."""
    return (int8.scale_of(amax, QMAX),)


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
    return tuple(scales(x, clip * amax) for clip in int4.CLIPS)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return int8.quantize(x, scale, QMAX)
