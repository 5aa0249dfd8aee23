"""SVDQuant's branch: a weight's largest singular directions stay in 16 bits, the rest is quantized (Li et al. 2024).

    W = up @ down + residual        y = Q(x) Q(residual)^T + (x down^T) up^T

Smoothing has moved the outliers of the input into the weight, where they are few directions; they go into the branch,
and what is left has small, even numbers. ``x`` is the smoothed input: the branch reads what the layer reads, so the
smoothing is never multiplied back into the residual.

The singular vectors are found by torch's randomised method (Halko et al. 2009): on a 10240x1280 weight at rank 32 it
takes a hundredth of the whole decomposition's time, and with four power iterations leaves a residual within 1 % of the
smallest there is (tested).
"""

import torch
from torch import Tensor

OVERSAMPLED = 8  # directions that are looked for beyond the rank


def rank_of(rank: int | float, shape: tuple[int, ...]) -> int:
    """``rank`` of a layer, or that fraction of the shorter side of its weight."""
    return rank if isinstance(rank, int) else max(1, round(rank * min(shape))) if rank else 0


def low_rank(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``up`` [out, rank] and ``down`` [rank, in], fp16, of a weight [out, in].

    The singular values are shared evenly between the two, which keeps both in fp16's range.
    """
    weight = weight.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, q=min(rank + OVERSAMPLED, *weight.shape), niter=4)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).half(), (v[:, :rank] * root).T.half()
