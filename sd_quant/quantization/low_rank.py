"""Low-rank branches, which stay in fp16 beside a quantized weight: SVDQuant's, and LoRAs.

    W = up @ down + residual        y = Q(x) Q(residual)^T + (x down^T) up^T

SVDQuant's branch (Li et al. 2024) takes the largest singular directions, into which smoothing has moved the outliers of
the input ``x``; the residual has small, even numbers. A branch can be refitted to the error E of rounding the residual.
The error of the output, E X^T for inputs X, has the norm of E L with L L^T = X^T X, so the branch is that of E L, times
the inverse of L (Zhang et al. 2024, "LQER", whose L is diagonal). Query, key and value of one input may share ``down``,
for a kernel that computes the three at once.

torch's randomized method (Halko et al. 2009) takes a hundredth of the time of a full decomposition for a 10240x1280
weight at rank 32. With four power iterations its residual is within 1 % of the smallest possible (tested).

A LoRA beside a quantized linear joins its branch, as in nunchaku (``lora/flux/nunchaku_converter.py``); PEFT and
ComfyUI's bypass (``comfy/weight_adapter/bypass.py``) add the same product to the layer's output. ``rewritten`` takes
the branch from weights with the LoRA fused: so the weight without the LoRA is quantized, and fp16's rounding of the two
factors with it. Layers in high precision have the LoRA fused.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment

OVERSAMPLED = 8  # directions computed beyond the rank


def low_rank(weight: Tensor, rank: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The branch of a weight W [out, in]: ``up`` [out, rank] and ``down`` [rank, in], both fp16.

    The product is nearest to W; with ``factor``, a lower triangular L [in, in], up down L is nearest to W L. Both have
    the square root of the singular values, so that fp16 holds them.
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
    """The branches of weights [out, in] with one common ``down``, from the weights on top of each other."""
    up, down = low_rank(torch.cat(list(weights)), rank, factor)
    return [(part, down) for part in up.split([len(weight) for weight in weights])]


def with_adapter(layer: LayerAssignment, up: Tensor, down: Tensor) -> LayerAssignment:
    """The row of a quantized linear with a LoRA beside it: ``up`` [out, rank] and ``down`` [rank, in], fp32.

    The branch reads the smoothed input, so smoothing divides ``down``; absorbed factors multiply ``up``. Both get
    magnitudes alike, so that fp16 holds them.
    """
    if layer.pre_quant_scale is not None:
        down = down / layer.pre_quant_scale
    if layer.output_scale is not None:
        up = up * layer.output_scale[:, None]
    ratio = down.abs().amax(1) / up.abs().amax(0)
    balance = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).sqrt()
    up, down = (up * balance).half(), (down / balance[:, None]).half()
    if layer.low_rank is not None:
        up, down = torch.cat([layer.low_rank[0], up], dim=1), torch.cat([layer.low_rank[1], down])
    return replace(layer, low_rank=(up, down))
