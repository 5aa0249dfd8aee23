"""SVDQuant's low-rank branch (Li et al. 2024): a weight's largest singular directions stay in fp16.

    W = up @ down + residual        y = Q(x) Q(residual)^T + (x down^T) up^T

Smoothing has moved the outliers of the input ``x`` into a few directions of the weight. The branch takes these, and the
residual has small, even numbers. Branch and quantized product both read the smoothed input.

A branch can be refitted to the error E that rounding the residual has left. The error of the output, E X^T for inputs
X, has the norm of E L with L L^T = X^T X. So the branch is that of E L, times the inverse of L (Zhang et al. 2024,
"LQER", whose L is diagonal).

Query, key and value of one input may share ``down``: the branch is that of their weights on top of each other, and a
kernel that computes the three at once multiplies with one. All linears of the role ``qkv`` that read one tensor do, key
and value of cross-attention too, which no such kernel needs; a feed-forward that reads the same does not.

torch's randomized method (Halko et al. 2009) takes a hundredth of the time of a full decomposition for a 10240x1280
weight at rank 32. With four power iterations its residual is within 1 % of the smallest possible (tested).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

OVERSAMPLED = 8  # directions computed beyond the rank


def rank_of(rank: int | float, shape: tuple[int, ...]) -> int:
    """The rank for a weight of this shape; a float is a fraction of the weight's shorter side."""
    return rank if isinstance(rank, int) else max(1, round(rank * min(shape))) if rank else 0


def low_rank(weight: Tensor, rank: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The branch of a weight [out, in]: ``up`` [out, rank] and ``down`` [rank, in], both fp16.

    The product is nearest to the weight; with ``factor``, a lower triangular L [in, in], its product with L is nearest
    to that of the weight. Each takes the square root of the singular values, so that fp16 holds both.
    """
    weight = weight.float() if factor is None else weight.float() @ factor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, q=min(rank + OVERSAMPLED, *weight.shape), niter=4)
    root = s[:rank].sqrt()
    up, down = u[:, :rank] * root, (v[:, :rank] * root).T
    if factor is not None:
        down = torch.linalg.solve_triangular(factor, down, upper=False, left=False)
    return up.half(), down.half()


def low_rank_of(weights: Sequence[Tensor], rank: int, factor: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """The branches of weights [out, in] that have one ``down``: that of the weights on top of each other."""
    up, down = low_rank(torch.cat(list(weights)), rank, factor)
    return [(part, down) for part in up.split([len(weight) for weight in weights])]
