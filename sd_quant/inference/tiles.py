"""Decode latents in overlapping tiles that fade into each other, by the rule of diffusers' ``enable_tiling``.

The tile bounds the decoder's working memory. Tiles at the right and lower edge are smaller. Normalization layers see
one tile only, so tones may differ from tile to tile. Alternative not taken: diffusers' own method, which calls its own
network and keeps all tiles in memory until the end; here two rows of tiles are kept.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sd_quant.models import LATENT_FACTOR

SHAPES = 4  # that tiles have: inside, at the right edge, at the lower edge and in the corner
STEP = 0.75  # from a tile to the next one, as a share of its side


def in_tiles(
    compute: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], inputs: Mapping[str, Tensor], tile: int | None
) -> Mapping[str, Tensor]:
    """Compute a decoder's output ``dec`` of its input ``z``, as a whole or in tiles of ``tile`` pixels a side."""
    return compute(inputs) if tile is None else {"dec": decode(lambda z: compute({"z": z})["dec"], inputs["z"], tile)}


def decode(decoder: Callable[[Tensor], Tensor], z: Tensor, tile: int) -> Tensor:
    """Decode latents ``z`` [B, C, h, w] to images [B, 3, H, W], in square tiles of ``tile`` pixels a side."""
    side = tile // LATENT_FACTOR  # a multiple of 4
    if max(z.shape[2:]) <= side:
        return decoder(z)
    step, rows, above = int(side * STEP), list[Tensor](), list[Tensor]()
    height, width = z.shape[2:]
    for top in range(0, height, step):
        row = list[Tensor]()
        for left in range(0, width, step):
            part = decoder(z[:, :, top : top + side, left : left + side])
            factor = part.shape[2] // min(side, height - top)
            overlap, kept = (side - step) * factor, step * factor
            if above:
                part = faded(above[len(row)], part, overlap, axis=2)
            if row:
                part = faded(row[-1], part, overlap, axis=3)
            row.append(part)
        rows.append(torch.cat([part[:, :, :kept, :kept] for part in row], dim=3))
        above = row
    return torch.cat(rows, dim=2)


def faded(before: Tensor, tile: Tensor, overlap: int, axis: int) -> Tensor:
    """Blend the first ``overlap`` rows or columns of ``tile`` along ``axis`` with the last of the tile ``before``."""
    overlap = min(before.shape[axis], tile.shape[axis], overlap)
    share = torch.arange(overlap, dtype=tile.dtype, device=tile.device) / overlap
    share = share.view(-1, *[1] * (3 - axis))
    last, first = before.narrow(axis, before.shape[axis] - overlap, overlap), tile.narrow(axis, 0, overlap)
    rest = tile.narrow(axis, overlap, tile.shape[axis] - overlap)
    return torch.cat([last * (1 - share) + first * share, rest], dim=axis)
