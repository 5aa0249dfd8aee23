"""SmoothQuant: move the outliers of a linear's input channels into its weight (Xiao et al. 2022, equation 4).

    s = a^alpha / w^(1 - alpha)      x / s  and  w * s  give the same product

with ``a`` the per-channel amax of the input and ``w`` that of the weight. The field stores ``pre_quant_scale = 1 / s``,
which multiplies the input; that is what is returned here. Clamping follows ModelOpt's ``model_calib.smoothquant``; a
channel that is never active gets 1, where ModelOpt's mask usually misses it and leaves it at the clamp.

The multiplication costs nothing when the module that makes the input does it: a norm in its gain and bias, a linear in
the rows of its weight. Linears that read one tensor then have to share one vector, with ``w`` the largest of all their
weights. ModelOpt multiplies before every layer instead, each with a vector of its own; ``SMOOTHINGS`` offers both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the knob smoothing is checked against the table below without torch
    from torch import Tensor

    from sd_quant.models.parts import SharedInput

SMALLEST, LARGEST = 1e-4, 1e4
DEAD_CHANNEL = 2.0**-31


def pre_quant_scale(activation_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """Factor of each input channel, fp32 [in_features]; 1 for channels that are never active.

    ``activation_amax`` and ``weight_amax``: fp32 [in_features], ``alpha`` in 0..1.
    """
    scale = weight_amax.pow(1 - alpha) / activation_amax.pow(alpha)
    dead = (activation_amax <= DEAD_CHANNEL) | (weight_amax <= DEAD_CHANNEL)
    return scale.clamp(SMALLEST, LARGEST).masked_fill(dead, 1.0)


def folded(inputs: Sequence[SharedInput]) -> list[SharedInput]:
    """One vector per input, moved into what makes the input."""
    return list(inputs)


def by_layer(inputs: Sequence[SharedInput]) -> list[SharedInput]:
    """A vector and a multiplication of its own before every layer."""
    return [replace(shared, readers=(reader,), producer=None) for shared in inputs for reader in shared.readers]


SMOOTHINGS: dict[str, Callable[[Sequence[SharedInput]], list[SharedInput]]] = {
    "folded": folded,
    "modelopt": by_layer,
    "none": by_layer,  # with alpha None, which gives no vector
}
