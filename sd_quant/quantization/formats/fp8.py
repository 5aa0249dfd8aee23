"""FP8 E4M3: one sign, four exponent and three mantissa bits, up to 448, no infinity; ``scale = amax / 448``.

Down to ``amax`` * 2^-15 numbers have a relative precision of 2^-4, so outliers cost little and inputs need no
smoothing; below that the steps are equal, like an integer's. Magnitudes beyond 448 become 448, as in TensorRT and in
ONNX with ``saturate``. They are clamped here, because torch does not do so in every version and on every device.

The format is that of Micikevicius et al. 2022 and OCP FP8 1.0, and torch's ``float8_e4m3fn``; the scale is ModelOpt's.
Not taken: E5M2, which inference has no use for.
"""

import torch
from torch import Tensor

from sd_quant.quantization.formats import int8

QMAX = 448.0

dequantize = int8.dequantize


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """``amax / 448``, exactly representable in fp16; ``x`` is not used."""
    return (int8.scale_of(amax, QMAX),)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-QMAX, QMAX).to(torch.float8_e4m3fn)
