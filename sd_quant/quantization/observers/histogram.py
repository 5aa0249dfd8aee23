"""The observers ``histogram`` and ``entropy``, which judge a histogram of the sample.

``histogram`` does what PyTorch's HistogramObserver and Quark do, with the format's own rounding. ``entropy`` does what
the histogram calibrators of pytorch-quantization and ModelOpt do (Migacz, GTC 2017). Their loops over every bin of
every candidate take a second for each layer; here the sums over the bins of a level are differences of prefix sums.
"""

import math

import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.observers.sample import LEVELS, quantization_errors, within_amax

BINS = 2048
STRIDE = 8  # bins between two ranges that ``histogram`` compares


def bin_counts(values: Tensor, amax: float, bins: int = BINS) -> Tensor:
    """The counts of ``|values|`` in equal bins over 0..``amax`` (> 0), fp32 [bins]; larger values count in the last."""
    return torch.histc((values.abs().float() / amax).clamp(max=1), bins, min=0, max=1)


@within_amax
def histogram(magnitudes: Tensor, amax: float, fmt: Format = FORMATS["int8"], levels: int = LEVELS, **_) -> float:
    """The range with the smallest error at the middles of the bins; the widest if several have it.

    Every STRIDE-th range is tried, from all bins down to one bin per level, zero included.
    """
    peak = magnitudes.max().item()
    middles, ranges = (torch.arange(BINS) + 0.5) / BINS, torch.arange(BINS, levels, -STRIDE) / BINS
    errors = quantization_errors(middles, ranges, fmt, levels, bin_counts(magnitudes, peak))
    return peak * ranges[errors.argmin()].item()


@within_amax
def entropy(magnitudes: Tensor, amax: float, levels: int = LEVELS, **_) -> float:
    """The range of at most BINS bins with the smallest divergence; the widest if several have it.

    The bin at zero gets the count of its neighbour, as in those calibrators, because zeros are exact in any range.
    """
    peak = magnitudes.max().item()
    counts = bin_counts(magnitudes, peak).double()
    counts[0] = counts[1]
    divergence = kl_divergences(counts, levels + 1)
    best = (divergence <= divergence.min() + 1e-12).nonzero()[-1].item()
    return peak * (levels + 1 + best) / BINS


def kl_divergences(counts: Tensor, runs: int) -> Tensor:
    """The information lost by each range of i = runs..len(counts) bins, in nats, fp64 [len(counts) - runs + 1].

    It is the Kullback-Leibler divergence between two distributions over the first i of ``counts`` (fp64 [bins]). The
    reference counts all clipped values in its last bin. The other distribution omits them; its bins are divided into
    equal ``runs``, one for each level and zero, and every filled bin holds the mean of its run. Where values are
    clipped into an empty bin, which the other distribution cannot have, the divergence is infinite.
    """
    total, filled = (torch.cat([torch.zeros(1).double(), part.cumsum(0)]) for part in (counts, (counts > 0).double()))
    plogp = torch.cat([torch.zeros(1).double(), torch.xlogy(counts, counts).cumsum(0)])
    width = torch.arange(runs, len(counts) + 1)
    edges = (width[:, None] * torch.arange(runs + 1) + runs - 1) // runs
    mass = total[edges].diff()
    mean = mass / filled[edges].diff().clamp(min=1)
    last, clipped = counts[width - 1], total[-1] - total[width]
    reference = plogp[width - 1] + torch.xlogy(last + clipped, last + clipped)
    compared = torch.xlogy(mass, mean).sum(1) + torch.xlogy(clipped, mean[:, -1])
    divergence = (reference - compared) / total[-1] + (total[width] / total[-1]).log()
    return torch.where((last == 0) & (clipped > 0), math.inf, divergence)
