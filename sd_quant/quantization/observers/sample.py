"""Common parts of the observers, and ``min_max`` and ``percentile``, which measure no error."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sd_quant.quantization.formats import Format, fake_quantize

LEVELS = 127  # of symmetric INT8 above zero


def within_amax(observer: Callable[..., float]) -> Callable[..., float]:
    """Make an observer of any values from a function of magnitudes (fp32 [n], finite and not all zero).

    Its range is at most ``amax``. It is ``amax`` where the sample is empty, all zero or not finite, or where the
    function returns 0.
    """

    @functools.wraps(observer)
    def observe(values: Tensor, amax: float, **options) -> float:
        magnitudes = values.detach().cpu().float().abs().flatten()
        peak = magnitudes.max().item() if len(magnitudes) else 0.0
        if not 0 < peak < math.inf:  # false for NaN too
            return amax
        return min(observer(magnitudes, amax, **options), amax) or amax

    return observe


def min_max(values: Tensor, amax: float, **_) -> float:
    """``amax``, the largest magnitude of the whole calibration."""
    return amax


@within_amax
def percentile(magnitudes: Tensor, amax: float, percent: float = 99.99, **_) -> float:
    """The smallest magnitude that ``percent`` % of the sample do not exceed.

    At 99.99 % this is the peak of any sample of less than 10 000 values.
    """
    return magnitudes.kthvalue(math.ceil(len(magnitudes) * percent / 100)).values.item()


def quantization_errors(
    magnitudes: Tensor, thresholds: Tensor, fmt: Format, levels: int = LEVELS, counts: Tensor | None = None
) -> Tensor:
    """The mean squared error, fp64 [m], of ``magnitudes`` [n] quantized with each of the ranges ``thresholds`` [m].

    Magnitudes are relative to their peak, so that every scale is a normal number in fp16. ``levels`` is the number of
    equal levels above zero. ``counts`` [n] says how often each magnitude occurs, once by default.
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
