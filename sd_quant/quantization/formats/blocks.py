"""What four-bit formats share: blocks along the last axis, and two codes to a byte."""

import torch
from torch import Tensor

from sd_quant.errors import SdQuantError


def blocks(x: Tensor, size: int) -> Tensor:
    """``x`` [..., n] in blocks, fp32 [..., n / size, size]. Raises SdQuantError when ``size`` does not divide n."""
    if x.shape[-1] % size:
        raise SdQuantError(
            f"{x.shape[-1]} numbers do not divide into blocks of {size}; keep the layer in high precision, "
            "or choose a format with smaller blocks"
        )
    return x.float().unflatten(-1, (-1, size))


def spread(scale: Tensor, numbers: int) -> Tensor:
    """A scale for each of the last axis' ``numbers`` from one per block: [..., blocks] -> [..., numbers]."""
    return scale.repeat_interleave(numbers // scale.shape[-1], dim=-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """n codes in C order as uint8 [ceil(n / 2)], the first in the low half of its byte, as in ONNX's ``raw_data``."""
    nibbles = codes.contiguous().view(torch.uint8).flatten() & 0xF
    pairs = torch.nn.functional.pad(nibbles, (0, len(nibbles) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4
