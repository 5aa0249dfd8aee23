"""Low-rank branches in fp16 in parallel to a quantized weight: SVDQuant's, and LoRAs.

    W = up @ down + residual        y = Q(x) Q(residual)^T + (x down^T) up^T

SVDQuant's branch (Li et al. 2024) has the largest singular components, into which smoothing has moved the outliers of
the input ``x``; the residual has small, even numbers. A branch can be refitted to the error E of rounding the residual.
The error of the output, E X^T for inputs X, has the norm of E L with L L^T = X^T X, so the refitted branch is the
truncated SVD of E L, times the inverse of L (Zhang et al. 2024, "LQER", with a diagonal L).

torch's randomized SVD (Halko et al. 2009) takes a hundredth of the time of a full SVD for a 10240x1280 weight at rank
32. With four power iterations the norm of its residual is within 1 % of the smallest possible (tested).

A LoRA on a quantized linear is appended to its branch, as in nunchaku (``lora/flux/nunchaku_converter.py``); PEFT and
ComfyUI's bypass (``comfy/weight_adapter/bypass.py``) add the same product to the layer's output. ``rewritten``
subtracts the branch from weights with the LoRA fused: so the weight without the LoRA is quantized, plus the error of
rounding the two factors to fp16. In layers in high precision the LoRA is fused into the weight.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment

OVERSAMPLED = 8  # directions computed beyond the rank


def low_rank(weight: Tensor, rank: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Approximate a weight W [out, in] by ``up`` [out, rank] @ ``down`` [rank, in], both fp16 (truncated SVD).

    With ``factor``, a lower triangular L [in, in], ``up @ down @ L`` approximates W L instead. Each factor gets the
    square roots of the singular values, so that both fit fp16.
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


def with_adapter(layer: LayerAssignment, up: Tensor, down: Tensor) -> LayerAssignment:
    """Append a LoRA, ``up`` [out, rank] and ``down`` [rank, in], fp32, to the low-rank branch of a quantized linear.

    The branch reads the smoothed input, so smoothing factors divide ``down``; absorbed output factors multiply ``up``.
    Then both factors are balanced in magnitude, so that they fit fp16.
    """
    if layer.pre_quant_scale is not None:
        down = down / layer.pre_quant_scale
    if layer.output_scale is not None:
        up = up * layer.output_scale[:, None]
    largest, of_up = down.abs().amax(1), up.abs().amax(0)
    ratio = torch.where(of_up > 0, largest / of_up, largest.square())  # an untrained LoRA has zeros in up
    balance = torch.where(ratio > 0, ratio, 1.0).sqrt()
    up, down = (up * balance).half(), (down / balance[:, None]).half()
    if layer.low_rank is not None:
        up, down = torch.cat([layer.low_rank[0], up], dim=1), torch.cat([layer.low_rank[1], down])
    return replace(layer, low_rank=(up, down))
