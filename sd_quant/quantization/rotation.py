"""Hadamard rotation: spread an outlier in one channel over all channels of its group before quantization.

    y = x W^T = (x H) (W H)^T        with H orthogonal; x H and W H are quantized

In four bits an outlier leaves the other numbers of its block few codes. QuaRot (Ashkboos et al. 2024) rotates with
Hadamard matrices; ConvRot (Huang et al. 2025) rotates groups of channels with regular Hadamard matrices, whose rows
have equal sums: the first row of Sylvester's matrix would turn the channels' mean into an outlier. H is symmetric, so
rotating twice restores ``x``, and its entries are powers of two, exact in fp16.

Alternatives not taken: absorbing a rotation into the layer before, because a norm's factors differ per channel, and of
a block's four linears only the attention's value could absorb it; and random signs, which add a dependence on a seed.
"""

import math

import torch
from torch import Tensor


def rotation_matrix(group: int) -> Tensor:
    """Return the regular Hadamard matrix of size ``group``, a power of 4: fp32, symmetric and orthogonal."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    matrix = four
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return matrix / math.sqrt(group)


def rotated(x: Tensor, group: int) -> Tensor:
    """Rotate each group of ``group`` channels along the last axis of ``x`` [..., n], in the dtype of ``x``.

    ``group`` is a power of 4 that divides n; 0 leaves ``x`` unchanged.
    """
    if not group:
        return x
    return (x.unflatten(-1, (-1, group)) @ rotation_matrix(group).to(x)).flatten(-2)
