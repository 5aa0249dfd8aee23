"""What observers share: magnitudes of a sample, their histogram, and the error of quantizing them."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sd_quant.quantization.formats import Format, fake_quantize

BINS = 2048
LEVELS = 128  # zero and the positive levels of INT8, and the narrowest range that is tried, in bins


def within_amax(observer: Callable[..., float]) -> Callable[..., float]:
    """``observer``, which takes magnitudes (fp32 [n], not all zero), ``amax`` and its options, for any values.

    The result is never more than ``amax``; it is ``amax`` where the sample is empty, all zero or not finite, or the
    observer returns 0.
    """

    @functools.wraps(observer)
    def observe(values: Tensor, amax: float, **options) -> float:
        magnitudes = values.detach().cpu().float().abs().flatten()
        peak = magnitudes.max().item() if len(magnitudes) else 0.0
        if not 0 < peak < math.inf:  # false for NaN too
            return amax
        return min(observer(magnitudes, amax, **options), amax) or amax

    return observe


def bin_counts(values: Tensor, amax: float, bins: int = BINS) -> Tensor:
    """Counts of ``|values|`` in equal bins over 0..``amax`` (> 0), fp32 [bins]. Larger values count in the last bin."""
    return torch.histc((values.abs().float() / amax).clamp(max=1), bins, min=0, max=1)


def quantization_errors(magnitudes: Tensor, thresholds: Tensor, fmt: Format, counts: Tensor | None = None) -> Tensor:
    """Mean squared error, fp64 [m], of ``magnitudes`` [n] quantized within each of ``thresholds`` [m].

    The magnitudes lie around 1, where fp16 rounds a scale as everywhere; ``counts`` [n] is how often each occurs.
    """
    weights = torch.ones_like(magnitudes) if counts is None else counts
    errors = [
        ((fake_quantize(fmt, magnitudes, threshold) - magnitudes).square().double() @ weights.double()).item()
        for threshold in thresholds
    ]
    return torch.tensor(errors).double() / weights.double().sum()
