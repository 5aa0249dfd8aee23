"""Helpers that several formats share: blocks along the last axis, 4-bit packing, and cuBLAS's tiles of scales."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.numbers import up_to

TILE_ROWS, TILE_COLUMNS = 128, 4  # of block scales, as cuBLAS requires them


def blocks(x: Tensor, size: int) -> Tensor:
    """Split ``x`` [..., n] into blocks, fp32 [..., n / size, size]. Raises SdQuantError unless ``size`` divides n."""
    if x.shape[-1] % size:
        raise SdQuantError(
            f"{x.shape[-1]} numbers do not divide into blocks of {size}; keep the layer in high precision, "
            "or choose a format with smaller blocks"
        )
    return x.float().unflatten(-1, (-1, size))


def per_number(scale: Tensor, numbers: int) -> Tensor:
    """Repeat the scale of each block for all of its numbers: [..., blocks] -> [..., numbers]."""
    return scale.repeat_interleave(numbers // scale.shape[-1], dim=-1)


def per_channel(scale: Tensor, weight: Tensor) -> Tensor:
    """Reshape ``scale`` [out] to broadcast over ``weight`` [out, ...]."""
    return scale.view(-1, *[1] * (weight.ndim - 1))


@dataclass(frozen=True)
class PerBlock(ABC):
    """A format with one scale for each block of ``size`` numbers along the last axis, [..., n / size]."""

    numbers: Any  # the format of the numbers: its ``quantize`` and ``dequantize`` take one scale per number
    size: int
    rows: int = 1  # consecutive rows of a weight whose blocks share a scale
    clips: tuple[float, ...] = (1.0,)  # fractions of a block's largest magnitude that a search tries as its range

    @abstractmethod
    def of_peak(self, peak: Tensor) -> Tensor:
        """Compute the scale of each block from its largest magnitude. Raises OverflowError if it cannot be stored."""

    def peaks(self, x: Tensor) -> Tensor:
        """Return the largest magnitude among the numbers that share each block's scale, [..., n / size]."""
        peak = blocks(x, self.size).abs().amax(-1)
        if self.rows > 1:
            peak = torch.cat([group.amax(0, keepdim=True).expand_as(group) for group in peak.split(self.rows)])
        return peak

    def scales(self, x: Tensor, amax: Tensor) -> tuple[Tensor]:
        return (self.of_peak(self.peaks(x)),)

    def tried_scales(self, x: Tensor, amax: Tensor) -> tuple[tuple[Tensor], ...]:
        peak = self.peaks(x)
        return tuple((self.of_peak(clip * peak),) for clip in self.clips)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.numbers.quantize(x, per_number(scale, x.shape[-1]))

    def dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return self.numbers.dequantize(codes, per_number(scale, codes.shape[-1]))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack n 4-bit codes, in C order, into uint8 [ceil(n / 2)], the first in the low half, as ONNX's ``raw_data``."""
    nibbles = codes.contiguous().view(torch.uint8).flatten() & 0xF
    pairs = F.pad(nibbles, (0, len(nibbles) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack each byte into two codes 0..15, the low half first: uint8, flat."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten()


def in_tiles(scales: Tensor) -> Tensor:
    """Reorder 8-bit block scales [N, blocks] into cuBLAS's tiled layout, padded with zeros to whole tiles.

    A tile has 128 rows and 4 columns. In memory, row r of a tile is followed by row r + 32.
    Source: cuBLAS's documentation, layout of 1D block scaling factors.
    """
    rows, columns = up_to(scales.shape[0], TILE_ROWS), up_to(scales.shape[1], TILE_COLUMNS)
    bits = F.pad(scales.view(torch.uint8), (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    tiles = bits.view(rows // TILE_ROWS, 4, 32, columns // TILE_COLUMNS, TILE_COLUMNS)  # quarters of a tile's rows
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scales.dtype)


def from_tiles(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """Undo ``in_tiles``: return the block scales [rows, columns] from a tiled tensor of any shape, without padding."""
    high, wide = up_to(rows, TILE_ROWS), up_to(columns, TILE_COLUMNS)
    tiles = tiled.view(torch.uint8).reshape(high // TILE_ROWS, wide // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :columns].contiguous().view(tiled.dtype)
