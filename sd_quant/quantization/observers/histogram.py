"""The observer ``histogram``: as PyTorch's HistogramObserver and Quark, but with the format's own rounding."""

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.observers.sample import BINS, LEVELS, bin_counts, quantization_errors, within_amax

STRIDE = 8  # bins between two ranges that are compared


@within_amax
def histogram(magnitudes: Tensor, amax: float, fmt: Format = FORMATS["int8"], levels: int = LEVELS, **_) -> float:
    """The range with the smallest error at the middles of the bins.

    Every STRIDE-th range of as many bins as there are levels, zero included, to all BINS is tried.
    """
    peak = magnitudes.max().item()
    middles, ranges = (torch.arange(BINS) + 0.5) / BINS, torch.arange(BINS, levels, -STRIDE) / BINS
    errors = quantization_errors(middles, ranges, fmt, levels, bin_counts(magnitudes, peak))
    return peak * ranges[errors.argmin()].item()  # the widest if several
