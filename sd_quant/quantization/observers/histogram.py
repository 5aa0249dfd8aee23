"""The observer of PyTorch's HistogramObserver and Quark, with the format's own rounding in place of a bin's width."""

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.observers.sample import BINS, LEVELS, bin_counts, quantization_errors, within_amax

STRIDE = 8  # bins between two ranges that are compared


@within_amax
def histogram(magnitudes: Tensor, amax: float, fmt: Format = FORMATS["int8"], **_) -> float:
    """The range with the smallest error at the bins' middles, among every STRIDE-th of LEVELS to BINS bins."""
    peak = magnitudes.max().item()
    middles, shares = (torch.arange(BINS) + 0.5) / BINS, torch.arange(BINS, LEVELS - 1, -STRIDE) / BINS
    best = quantization_errors(middles, shares, fmt, bin_counts(magnitudes, peak)).argmin()  # of equal ones the widest
    return peak * shares[best].item()
