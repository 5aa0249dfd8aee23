"""The observer of pytorch-quantization's and ModelOpt's histogram calibrators (Migacz, GTC 2017).

Their loops over every bin of every candidate take a second a layer; here the sums over a level are differences of
prefix sums.
"""

import math

import torch
from torch import Tensor

from sd_quant.quantization.observers.sample import BINS, LEVELS, bin_counts, within_amax


def kl_divergences(counts: Tensor) -> Tensor:
    """Information lost by each range of i = LEVELS..len(counts) bins, in nats, fp64 [len(counts) - LEVELS + 1].

    The reference is the first i of ``counts`` (fp64 [bins]), the last of them with all that is clipped. It is compared
    with LEVELS equal runs of these bins, every filled bin holding the mean of its run, without what is clipped.
    Infinite where values are clipped into an empty bin, which the second distribution does not have.
    """
    total, filled = (torch.cat([torch.zeros(1).double(), part.cumsum(0)]) for part in (counts, (counts > 0).double()))
    plogp = torch.cat([torch.zeros(1).double(), torch.xlogy(counts, counts).cumsum(0)])
    width = torch.arange(LEVELS, len(counts) + 1)
    edges = (width[:, None] * torch.arange(LEVELS + 1) + LEVELS - 1) // LEVELS
    mass = total[edges].diff()
    mean = mass / filled[edges].diff().clamp(min=1)
    last, clipped = counts[width - 1], total[-1] - total[width]
    reference = plogp[width - 1] + torch.xlogy(last + clipped, last + clipped)
    compared = torch.xlogy(mass, mean).sum(1) + torch.xlogy(clipped, mean[:, -1])
    divergence = (reference - compared) / total[-1] + (total[width] / total[-1]).log()
    return torch.where((last == 0) & (clipped > 0), math.inf, divergence)


@within_amax
def entropy(magnitudes: Tensor, amax: float, **_) -> float:
    """The range of LEVELS to BINS bins with the smallest divergence, of equal ones the widest.

    The bin at zero gets the count of its neighbour, as in the calibrators above: zeros are exact in any range.
    """
    peak = magnitudes.max().item()
    counts = bin_counts(magnitudes, peak).double()
    counts[0] = counts[1]
    divergence = kl_divergences(counts)
    best = (divergence <= divergence.min() + 1e-12).nonzero()[-1].item()
    return peak * (LEVELS + best) / BINS
