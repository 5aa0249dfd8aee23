"""What the observers share: the magnitudes of a sample, their histogram, and the error of quantizing them."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sd_quant.quantization.formats import Format, fake_quantize

BINS = 2048
LEVELS = 127  # of symmetric INT8 above zero


def within_amax(observer: Callable[..., float]) -> Callable[..., float]:
    """Makes of a function of magnitudes (fp32 [n], finite and not all zero) an observer of any values.

    Its range is never more than ``amax``, and is ``amax`` where the sample is empty, all zero or not finite, or where
    ``observer`` returns 0.
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
    """The counts of ``|values|`` in equal bins over 0..``amax`` (> 0), fp32 [bins]; larger values count in the last."""
    return torch.histc((values.abs().float() / amax).clamp(max=1), bins, min=0, max=1)


def quantization_errors(
    magnitudes: Tensor, thresholds: Tensor, fmt: Format, levels: int = LEVELS, counts: Tensor | None = None
) -> Tensor:
    """The mean squared error, fp64 [m], of ``magnitudes`` [n] quantized with each of the ranges ``thresholds`` [m].

    The magnitudes are relative to their peak, so that every scale is a normal number in fp16. Equal levels are as many
    as ``levels`` above zero. ``counts`` [n] says how often each magnitude occurs, once by default.
    """
    weights = torch.ones_like(magnitudes) if counts is None else counts

    def fake_quantized(threshold: Tensor) -> Tensor:
        if not fmt.equal_levels:
            return fake_quantize(fmt, magnitudes, threshold)
        step = threshold / levels
        return (magnitudes / step).round().clamp(max=levels) * step

    errors = [
        ((fake_quantized(threshold) - magnitudes).square().double() @ weights.double()).item()
        for threshold in thresholds
    ]
    return torch.tensor(errors).double() / weights.double().sum()
