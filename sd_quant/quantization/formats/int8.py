"""Symmetric INT8: ``q = clamp(round(x / scale), -128, 127)``, ``scale = amax / 127``, zero point 0.

A scale is rounded to fp16 *before* anything is quantized with it, because the exported graph stores it in fp16. So the
torch simulation, the INT8 weights and the engine use the same number.
"""

import math

import torch
from torch import Tensor

QMAX = 127.0
SMALLEST_SCALE = 2.0**-20  # smaller ones have few bits in fp16, or are zero; weights this small do not matter


def scale_of(amax: Tensor, qmax: float = QMAX) -> Tensor:
    """``amax / qmax`` in fp32, exactly representable in fp16; 1 where ``amax`` is zero.

    Raises OverflowError when a scale does not fit fp16 or is NaN.
    """
    scale = unchecked_scale_of(amax, qmax)
    if not math.isfinite(scale.sum()):  # of no negative ones, so the sum is finite if all are
        raise OverflowError(f"an amax of {amax.max().item():g} gives a scale that fp16 cannot hold")
    return scale


def unchecked_scale_of(amax: Tensor, qmax: float) -> Tensor:
    """``scale_of``, infinite or NaN where it is not representable; no call waits for a GPU."""
    return torch.where(amax == 0, 1.0, (amax.float() / qmax).clamp(min=SMALLEST_SCALE)).half().float()


def scales(x: Tensor, amax: Tensor) -> tuple[Tensor]:
    """``amax / 127``; ``x`` is not used."""
    return (scale_of(amax),)


def per_channel(scale: Tensor, weight: Tensor) -> Tensor:
    """``scale`` [out] shaped to broadcast over ``weight`` [out, ...]."""
    return scale.view(-1, *[1] * (weight.ndim - 1))


def quantize(x: Tensor, scale: Tensor, qmax: float = QMAX) -> Tensor:
    return (x.float() / scale).round_().clamp_(-qmax - 1, qmax).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale
