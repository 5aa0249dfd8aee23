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
    """Round ``x`` to the nearest E2M1 numbers and return their codes, uint8 0..15."""
    magnitude = torch.bucketize(x.abs().float(), BOUNDARIES.to(x.device), out_int32=True).to(torch.uint8)
    return magnitude | torch.signbit(x).to(torch.uint8) << 3


def decode(codes: Tensor) -> Tensor:
    """Return the numbers that the codes represent, fp32.

    The magnitude's three bits become fp16's two lowest exponent bits and highest mantissa bit; times 2^14 that is the
    number. A lookup table would be copied to the GPU in every call, which a CUDA graph cannot record.
    """
    bits = codes.to(torch.int16)
    return ((bits & 8) << 12 | (bits & 7) << 9).view(torch.float16).float() * 2.0**14


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    return encode(x.float() / scale)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return decode(codes) * scale
