"""Symmetric INT4 in blocks of 64: ``q = clamp(round(x / scale), -8, 7)``, ``scale = max |block| / 7``.

This is the group quantization of ModelOpt and deepcompressor. The code -8 never occurs. Not taken: a zero point, which
TensorRT's INT4 does not have.
"""

from torch import Tensor

from sd_quant.quantization.formats import FORMATS, int8
from sd_quant.quantization.formats.blocks import blocks, per_number

BLOCK = FORMATS["int4"].block
QMAX = 7.0
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the largest number of a block, tried for a weight


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """The scale of every block, [..., n / 64], exactly representable in fp16; ``amax`` is not used."""
    return (int8.scale_of(blocks(x, BLOCK).abs().amax(-1), QMAX),)


def tried_scales(x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
    largest = blocks(x, BLOCK).abs().amax(-1)
    return tuple((int8.scale_of(clip * largest, QMAX),) for clip in CLIPS)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return int8.quantize(x, per_number(scale, x.shape[-1]), QMAX)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return int8.dequantize(codes, per_number(scale, codes.shape[-1]))


def onnx_scale(apply, amax, global_scale: float):
    """``max(amax / 7, SMALLEST_SCALE)`` in fp16."""
    return apply("Cast", apply("Max", apply("Div", amax, QMAX), int8.SMALLEST_SCALE), to="FLOAT16")
