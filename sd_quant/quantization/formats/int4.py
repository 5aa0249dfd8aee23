"""Symmetric INT4 in blocks of 64: ``q = clamp(round(x / scale), -8, 7)``, ``scale = max |block| / 7``.

ModelOpt's and deepcompressor's group quantization. The level -8 is never needed. Not taken: an asymmetric zero point,
which TensorRT's INT4 has not.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats.blocks import blocks, pack_nibbles, spread
from sd_quant.quantization.formats.int8 import scale_of

BLOCK = 64
BITS = 4
QMAX = 7.0
ONNX_TYPE, ONNX_SCALE_TYPES, OPSET = "INT4", ("FLOAT16",), 21


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """fp16 numbers [..., n / 64] from the blocks of ``x``; ``amax`` is not used."""
    return (scale_of(blocks(x, BLOCK).abs().amax(-1), QMAX),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / spread(scale, BLOCK)).round().clamp(-QMAX - 1, QMAX).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * spread(scale, BLOCK)


def pack(codes: Tensor) -> Tensor:
    return pack_nibbles(codes)
