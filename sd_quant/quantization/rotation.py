"""Rotation spreads an outlier of one channel over all channels of its group.

    y = x W^T = (x H) (W H)^T        with H orthogonal; x H and W H are quantized

In four bits an outlier leaves the other numbers of its block few codes. QuaRot (Ashkboos et al. 2024) rotates with
Hadamard matrices, ConvRot (Huang et al. 2025) groups of channels with regular ones, whose rows have equal sums: the
first row of Sylvester's would turn the channels' mean into an outlier. H is symmetric, so rotating twice restores
``x``, and its entries are powers of two, exact in fp16.

Not taken: absorbing a rotation into the layer in front, because a norm's factors differ per channel, and of a block's
four linears only the attention's value could absorb one; and random signs, which make results depend on a seed.
"""

import math

import torch
from torch import Tensor


def rotation_matrix(group: int) -> Tensor:
    """The regular Hadamard matrix of a power of 4, symmetric and orthogonal: fp32 [group, group]."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    matrix = four
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return matrix / math.sqrt(group)


def rotated(x: Tensor, group: int) -> Tensor:
    """``x`` [..., n] with each ``group`` of its last axis rotated, in its dtype; unchanged where ``group`` is 0.

    ``group`` is a power of 4 that divides n.
    """
    if not group:
        return x
    return (x.unflatten(-1, (-1, group)) @ rotation_matrix(group).to(x)).flatten(-2)
