"""SmoothQuant: move the outliers of a linear's input channels into its weight (Xiao et al. 2022, equation 4).

    s = a^alpha / w^(1 - alpha)      x / s  and  W * s  give the same product

Here ``a`` is the largest magnitude of each input channel, ``w`` that of each column of the weight. As in ModelOpt,
``pre_quant_scale = 1 / s`` is stored, which multiplies the input, and clamped as in ``model_calib.smoothquant``. A
channel that is never active gets 1, where ModelOpt's mask usually keeps the clamp's limit.

The module that produces the input can absorb the factors: a norm in its gain and bias, a linear in the rows of its
weight. If the input is ``norm * (1 + scale) + shift``, the linear that computes scale and shift absorbs them: with p
for ``pre_quant_scale``, scale' = p * scale + (p - 1) and shift' = p * shift. All linears that read the input then share
one vector, and ``w`` is the maximum over their weights. ModelOpt multiplies before every layer, each by its own vector.

Equation 4 amplifies channels with small magnitudes in calibration; another prompt may make such a channel large, and a
static range then clips it: in the worst image of a trained checkpoint, a channel reached 4.8 times the smoothed range.
So when alpha is searched for a static range, a lower limit of magnitudes (``awake``) is searched too, see ``linears``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the table below is read before torch is loaded
    from torch import Tensor

    from sd_quant.models.parts import SharedInput

SMALLEST_FACTOR, LARGEST_FACTOR = 1e-4, 1e4
DEAD_CHANNEL = 2.0**-31  # a channel with no larger magnitude is never active
QUIET = (0.0, 0.75, 0.97)  # quantiles of channels' magnitudes, tried as lower limits by alpha=auto, see ``awake``


def pre_quant_scale(activation_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """Compute SmoothQuant's 1 / s of each input channel, fp32 [in_features]; 1 for channels that are never active.

    ``activation_amax`` and ``weight_amax``: fp32 [in_features], ``alpha`` in 0..1.
    """
    scale = weight_amax.pow(1 - alpha) / activation_amax.pow(alpha)
    dead = (activation_amax <= DEAD_CHANNEL) | (weight_amax <= DEAD_CHANNEL)
    return scale.clamp(SMALLEST_FACTOR, LARGEST_FACTOR).masked_fill(dead, 1.0)


def awake(activation_amax: Tensor, quiet: float) -> Tensor:
    """Raise each channel of ``activation_amax`` [in_features] to at least the quantile ``quiet`` of all channels.

    Channels that are never active (at most ``DEAD_CHANNEL``) are unchanged.
    """
    raised = activation_amax.clamp(min=activation_amax.quantile(quiet))
    return raised.where(activation_amax > DEAD_CHANNEL, activation_amax)


def range_keeping_scale(activation_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """Rescale ``pre_quant_scale`` by one factor so that the largest magnitude of the input does not change.

    Used for a modulation, whose bias stores p - 1 in fp16 (p: ``pre_quant_scale``). The rounding error, up to 2^-12,
    would be large relative to a small p; with this factor, channels of large magnitude have p near 1, and the error is
    far below an 8-bit step. A common factor changes quantized values only through the rounding of scales to fp16.
    """
    scale = pre_quant_scale(activation_amax, weight_amax, alpha)
    largest, smoothed = activation_amax.max(), (activation_amax * scale).max()
    return (scale * largest / smoothed).clamp(SMALLEST_FACTOR, LARGEST_FACTOR) if smoothed > 0 else scale


def per_layer(inputs: Sequence[SharedInput]) -> list[SharedInput]:
    """Split shared inputs into one per linear, each with its own smoothing vector and multiplication (no producer)."""
    alone = [replace(shared, producer=None, modulation=None) for shared in inputs]
    return [replace(shared, readers=(reader,)) for shared in alone for reader in shared.readers]


SMOOTHINGS: dict[str, Callable[[Sequence[SharedInput]], list[SharedInput]]] = {
    "folded": list,  # one vector for each input, absorbed by the producer
    "modelopt": per_layer,
    "none": per_layer,  # for alpha=null, which gives no vector
}
