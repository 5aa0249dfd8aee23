"""Rotated inputs: an outlier in one channel becomes a little more in all channels of its group.

    y = x W^T = (x H) (W H)^T        with H orthogonal, and what is rounded is x H and W H

A scale that a block of numbers shares is as large as its largest number, so in four bits one outlier leaves its
neighbours few codes. QuaRot (Ashkboos et al. 2024) rotates with Hadamard matrices, whose numbers are all 1 or -1 over a
root. ConvRot (Huang et al. 2025) rotates groups of channels with regular ones, whose rows have the same sum: the first
row of Sylvester's is all 1, and where the channels have a mean, as behind an activation function, it becomes an outlier
itself. Groups make the product small beside that of the layer, and fit all widths that networks have.

H is symmetric, so rotating twice gives ``x`` again, and its numbers are powers of two: fp16 holds them exactly. Not
taken: absorbing a rotation into the layer in front. Where a norm stands its factors differ per channel; an attention's
values could take that of the output projection, one of four in a block. And random signs, with which results would
depend on a seed.
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
    """``x`` [..., n] with each ``group`` of its last axis rotated, in its dtype; ``x`` itself where ``group`` is 0.

    ``group`` is a power of 4 that divides n. Rotated twice it is ``x`` again.
    """
    if not group:
        return x
    return (x.unflatten(-1, (-1, group)) @ rotation_matrix(group).to(x)).flatten(-2)
