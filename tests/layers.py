"""Assigned layers to try products on."""

import torch

from sd_quant.quantization.assignment import LayerAssignment


def static_layer(weight: torch.Tensor, fmt: str, per_row: bool, activation_amax: float = 4.0) -> LayerAssignment:
    """``weight`` and its input in ``fmt``, the weight with one scale or with one for each of its rows."""
    amax = weight.abs().flatten(1).amax(1)
    return LayerAssignment(
        "layer", "ffn", tuple(weight.shape), fmt, fmt,
        weight_axis=0 if per_row else None, weight_amax=amax if per_row else amax.amax().view(1),
        activation_amax=activation_amax,
    )  # fmt: skip
