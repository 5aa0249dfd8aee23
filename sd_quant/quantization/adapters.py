"""A LoRA beside a quantized linear, in 16 bits, as tools add it to a model that was quantized without it.

    y = Q(x) Q(W)^T + (x down^T) up^T

The row gets the LoRA in its low-rank branch, which simulation, export and engines compute. They read weights with the
LoRA fused, and ``rewritten`` takes the branch from these: so the weight that is quantized is the one without the LoRA,
and what fp16 takes from the two factors is rounded with it. Layers in high precision have the LoRA fused.

nunchaku appends a LoRA to its branch (``lora/flux/nunchaku_converter.py``), PEFT and ComfyUI's bypass
(``comfy/weight_adapter/bypass.py``) add it to the layer's output; each is this sum.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment


def with_adapter(layer: LayerAssignment, up: Tensor, down: Tensor) -> LayerAssignment:
    """The row of a quantized linear with an adapter beside it: ``up`` [out, rank] and ``down`` [rank, in], fp32.

    The branch reads the smoothed input, so smoothing divides ``down``; what the layer has absorbed multiplies ``up``.
    Both get magnitudes alike, so that fp16 holds them.
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
