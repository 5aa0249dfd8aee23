"""FP8 E4M3: one sign, four exponent and three mantissa bits, up to 448, no infinity; ``scale = amax / 448``.

A number of the normal range keeps a relative precision of 2^-4, however far below ``amax`` it is, so outliers cost
little and no smoothing is needed; below ``amax`` 2^-15 the steps are equal, as an integer's. What exceeds 448 after
scaling is kept at 448, as TensorRT and ONNX do with ``saturate``; not every version and device of torch casts so.

The format is that of Micikevicius et al. 2022 and OCP FP8 1.0, which torch calls ``float8_e4m3fn``; the scale is
ModelOpt's. Not taken: E5M2, which inference has no use for.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats.int8 import scale_of

QMAX = 448.0


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """``amax / 448`` in fp16, whatever ``x`` holds."""
    return (scale_of(amax, QMAX),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-QMAX, QMAX).to(torch.float8_e4m3fn)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale


def pack(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)
