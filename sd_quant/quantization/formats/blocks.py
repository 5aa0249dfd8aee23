"""Common parts of formats with blocks: blocks along the last axis, two codes to a byte, and scales in tiles."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.numbers import up_to

TILE_ROWS, TILE_COLUMNS = 128, 4  # of block scales, as cuBLAS requires them


def blocks(x: Tensor, size: int) -> Tensor:
    """``x`` [..., n] in blocks, fp32 [..., n / size, size]. Raises SdQuantError when ``size`` does not divide n."""
    if x.shape[-1] % size:
        raise SdQuantError(
            f"{x.shape[-1]} numbers do not divide into blocks of {size}; keep the layer in high precision, "
            "or choose a format with smaller blocks"
        )
    return x.float().unflatten(-1, (-1, size))


def per_number(scale: Tensor, numbers: int) -> Tensor:
    """The scale of each of ``numbers`` along the last axis, from one per block: [..., blocks] -> [..., numbers]."""
    return scale.repeat_interleave(numbers // scale.shape[-1], dim=-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """n codes in C order as uint8 [ceil(n / 2)], the first in the low half of its byte, as in ONNX's ``raw_data``."""
    nibbles = codes.contiguous().view(torch.uint8).flatten() & 0xF
    pairs = F.pad(nibbles, (0, len(nibbles) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The nibbles 0..15 of ``pack_nibbles``, uint8, two of each byte."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten()


def in_tiles(scales: Tensor) -> Tensor:
    """Block scales [N, blocks] of eight bits in cuBLAS's layout, padded with zeros to whole tiles.

    A tile has 128 rows and 4 columns. In memory, row r of a tile is followed by row r + 32.
    Source: cuBLAS's documentation, layout of 1D block scaling factors.
    """
    rows, columns = up_to(scales.shape[0], TILE_ROWS), up_to(scales.shape[1], TILE_COLUMNS)
    bits = F.pad(scales.view(torch.uint8), (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = bits.view(rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)  # quarters of a tile's rows
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scales.dtype)


def from_tiles(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """The block scales [rows, columns] from ``in_tiles``' layout, in any shape, without the padding."""
    high, wide = up_to(rows, TILE_ROWS), up_to(columns, TILE_COLUMNS)
    tiles = tiled.view(torch.uint8).reshape(high // TILE_ROWS, wide // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :columns].contiguous().view(tiled.dtype)
