"""FP8 E4M3: one sign, four exponent and three mantissa bits, up to 448, no infinity; ``scale = amax / 448``.

A normal number has a relative precision of 2^-4, however far below ``amax`` it is, so outliers cost little and no
smoothing is needed. Below ``amax`` * 2^-15 the steps are equal, as an integer's. Magnitudes that exceed 448 after
scaling become 448, as in TensorRT and in ONNX with ``saturate``; they are clamped here, because torch does not do it in
every version and on every device.

The format is that of Micikevicius et al. 2022 and OCP FP8 1.0, and torch's ``float8_e4m3fn``. The scale is ModelOpt's.
Not taken: E5M2, which inference has no use for.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats.int8 import scale_of

QMAX = 448.0


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """``amax / 448``, exactly representable in fp16; ``x`` is not used."""
    return (scale_of(amax, QMAX),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-QMAX, QMAX).to(torch.float8_e4m3fn)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale


def pack(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    return packed.view(torch.float8_e4m3fn)
