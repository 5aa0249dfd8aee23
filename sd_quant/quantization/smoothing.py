"""SmoothQuant: move the outliers of a linear's input channels into its weight (Xiao et al. 2022, equation 4).

    s = a^alpha / w^(1 - alpha)      x / s  and  w * s  give the same product

with ``a`` the per-channel amax of the input and ``w`` that of the weight. The field stores ``pre_quant_scale = 1 / s``,
which multiplies the input; that is what is returned here. Clamping follows ModelOpt's ``model_calib.smoothquant``; a
channel that is never active gets 1, where ModelOpt's mask usually misses it and leaves it at the clamp. Not taken:
folding the scale into the preceding normalisation. Query, key and value of one attention share that normalisation and,
for alpha < 1, want three different scales.
"""

import torch
from torch import Tensor

SMALLEST, LARGEST = 1e-4, 1e4
DEAD_CHANNEL = 2.0**-31


def pre_quant_scale(activation_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """Factor of each input channel, fp32 [in_features]; 1 for channels that are never active.

    ``activation_amax`` and ``weight_amax``: fp32 [in_features], ``alpha`` in 0..1.
    """
    scale = weight_amax.pow(1 - alpha) / activation_amax.pow(alpha)
    dead = (activation_amax <= DEAD_CHANNEL) | (weight_amax <= DEAD_CHANNEL)
    return torch.where(dead, 1.0, scale.clamp(SMALLEST, LARGEST))
