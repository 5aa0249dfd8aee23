"""The memory order of a linear's tensors for nunchaku's kernels: tiles that the threads of a warp load at once.

A layout splits the axes of a matrix in natural order (``reshape``) and orders the pieces (``permute``). N are a
linear's outputs, K its inputs, R the rank of its branch.

| numbers              | natural order | stored as                                                        |
|----------------------|---------------|------------------------------------------------------------------|
| codes of W4A4        | [N, K]        | int8 [N, K / 2], the first code in the low half of a byte        |
| scales of INT4       | [N, K / 64]   | [K / 64, N]                                                      |
| scales of NVFP4      | [N, K / 16]   | E4M3 [K / 16, N]                                                 |
| a vector of N or K   | [N]           | [N], as scales of one group                                      |
| branch, down         | [R, K]        | [K, R]                                                           |
| branch, up           | [N, R]        | [N, R]                                                           |
| codes of W4A16 (AWQ) | [N, K]        | int32 [N / 4, K / 2], see ``awq_codes``; its scales are in order |

N and K are multiples of 128, R of 16. Source: nunchaku's ``lora/flux/packer.py``; tests compare with the packers of
auto-round and cache-dit, bit for bit, and with flat formulas.

Alternative not taken: deepcompressor's padding, as nunchaku's linears in Python refuse sizes other than the model's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.quantization.formats.blocks import pack_nibbles, unpack_nibbles

SIDE, RANK = 128, 16  # of which N and K, and R, are multiples


@dataclass(frozen=True)
class Layout:
    """A memory order: the axes of a matrix of ``shape`` are split into ``pieces``, which are permuted to ``order``."""

    shape: tuple[int, int]
    pieces: tuple[int, ...]
    order: tuple[int, ...]

    def tiled(self, matrix: Tensor) -> Tensor:
        """Return the numbers of a ``matrix`` in memory order, in one axis."""
        return matrix.reshape(self.pieces).permute(self.order).flatten()

    def natural(self, tiled: Tensor) -> Tensor:
        """Return the matrix in natural order from ``tiled`` numbers."""
        ordered = tiled.reshape([self.pieces[piece] for piece in self.order])
        return ordered.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).reshape(self.shape)


def codes(rows: int, columns: int) -> Layout:
    """Return the memory order of a W4A4 weight's codes."""
    return Layout((rows, columns), (rows // 128, 8, 2, 8, columns // 64, 2, 4, 8), (0, 4, 1, 3, 6, 2, 5, 7))


def scales(rows: int, groups: int) -> Layout:
    """Return the memory order of INT4's scales, or of a vector as one group."""
    return Layout((rows, groups), (rows // 128, 8, 2, 4, 2, groups), (0, 5, 1, 3, 2, 4))


def micro_scales(rows: int, groups: int) -> Layout:
    """Return the memory order of NVFP4's scales."""
    return Layout((rows, groups), (rows // 128, 4, 4, 8, groups // 4, 4), (0, 4, 3, 2, 1, 5))


def down(rank: int, columns: int) -> Layout:
    """Return the memory order of the low-rank branch's matrix that multiplies the input."""
    return Layout((rank, columns), (rank // 16, 2, 8, columns // 16, 2, 4, 2), (3, 0, 2, 5, 1, 4, 6))


def up(rows: int, rank: int) -> Layout:
    """Return the memory order of the low-rank branch's matrix that produces the output."""
    return Layout((rows, rank), (rows // 16, 2, 8, rank // 16, 2, 4, 2), (0, 3, 2, 5, 1, 4, 6))


def awq_codes(rows: int, columns: int) -> Layout:
    """Return W4A16's order of codes: 64 columns of each of four rows in turn, in the order 0, 8, 16, 24, 1, 9, ..."""
    return Layout((rows, columns), (rows // 4, 4, columns // 64, 2, 4, 8), (0, 2, 1, 3, 5, 4))


def packed(layout: Layout, matrix: Tensor) -> Tensor:
    """Pack 4-bit codes in natural order to bytes, uint8 [rows * columns / 2], the first code in the low half."""
    return pack_nibbles(layout.tiled(matrix))


def unpacked(layout: Layout, stored: Tensor) -> Tensor:
    """Return the codes 0..15 in natural order, uint8 [rows, columns], from bytes of any integer type."""
    return layout.natural(unpack_nibbles(stored.contiguous().view(torch.uint8).flatten()))


def vector_in_tiles(vector: Tensor) -> Tensor:
    return scales(len(vector), 1).tiled(vector)


def vector_from_tiles(stored: Tensor) -> Tensor:
    return scales(len(stored), 1).natural(stored)[:, 0]
