"""FP4 E2M1 (OCP Microscaling Formats 1.0, 5.3.3): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

A code is the bit pattern: a sign bit, two exponent bits, one mantissa bit. Ties round to the even code, as in IEEE 754,
and magnitudes beyond 6 become 6.
"""

import torch
from torch import Tensor

LARGEST = 6.0
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
HALFWAY = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
# The code of a magnitude is the number of boundaries below it. A tie above an odd code belongs to the next code, so its
# boundary is the next smaller number.
BOUNDARIES = torch.where(torch.arange(7) % 2 == 0, HALFWAY, HALFWAY.nextafter(torch.tensor(0.0)))


def encode(x: Tensor) -> Tensor:
    """The codes of the nearest numbers, uint8 0..15."""
    magnitude = torch.bucketize(x.abs().float(), BOUNDARIES.to(x.device), out_int32=True).to(torch.uint8)
    return magnitude | torch.signbit(x).to(torch.uint8) << 3


def decode(codes: Tensor) -> Tensor:
    """The numbers of the codes, fp32.

    The magnitude's three bits are fp16's lowest exponent bits and its highest mantissa bit, times 2^14. A table would
    be copied to the GPU in every call, which a CUDA graph cannot record.
    """
    bits = codes.to(torch.int16)
    return ((bits & 8) << 12 | (bits & 7) << 9).view(torch.float16).float() * 2.0**14


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return encode(x.float() / scale)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return decode(codes) * scale
