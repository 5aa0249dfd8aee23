"""The range of an activation from a sample of its values: how much to clip so that the rest gets finer steps.

INT8 with range t rounds x to ``s * clamp(round(x / s), -127, 127)`` with ``s = t / 127``. A smaller t rounds better and
clips more; the observers differ in what they call best:

| observer   | range                                                                                        |
|------------|----------------------------------------------------------------------------------------------|
| min_max    | the largest value of the whole calibration: nothing is clipped                               |
| percentile | so many percent of the sample lie within it                                                  |
| histogram  | the squared error of rounding and clipping the middles of a histogram's bins is smallest     |
| entropy    | 128 levels lose the least information of the sample's histogram (Migacz, GTC 2017)           |
| mse        | the squared error of rounding and clipping the sample is smallest                            |

The values are those that the quantizer sees, after smoothing, so another observer costs no calibration. All but the
first judge the sample by its own peak, not by ``amax``: for one value in a billion that the sample missed, a histogram
up to it would hold the rest in a few bins. E4M3 rounds as well far below the range as near to it, so it gains little
from any of them; ``entropy`` counts levels that it has not.

``entropy`` is that of pytorch-quantization's and ModelOpt's histogram calibrators, whose loops over every bin of every
candidate take a second a layer; here the sums over a level are differences of prefix sums. ``mse`` departs from theirs,
which measures the error at the centres of bins that may be as wide as a step. The values are sorted instead, and the
error of a threshold is exact: the levels are ks, values above b_k = (k - 1/2) s go to level k or higher, so that

    sum (x - quantized x)^2  =  sum x^2  -  2 s  sum_k  sum over |x| > b_k of (|x| - b_k),    k = 1 .. 127

where the inner sum is one search and one prefix sum. Not taken: the level -128, which has no positive twin. It can only
make an error smaller, so ``mse`` never does worse than ``max`` with it either.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format, fake_quantize
from sd_quant.quantization.formats.int8 import QMAX

PERCENTILE = 99.99
STRIDE = 8  # bins between two ranges that ``histogram`` compares
SEEN = 2**16  # values of a sample that ``mse`` looks at where it has no closed form
BINS = 2048
LEVELS = 128  # zero and the positive levels: what the magnitudes are quantized to, and the narrowest range in bins

# mse's thresholds as shares of the peak, 1 % apart: its error is flat around the best one. Down to half a step of the
# unclipped range: a narrower one pays only where that range would round nearly all values to zero.
SHARES = 0.99 ** np.arange(math.log(2 * QMAX) / -math.log(0.99))

Observer = Callable[..., float]


def histogram(values: Tensor, amax: float, bins: int = BINS) -> Tensor:
    """Counts of ``|values|`` in equal bins over 0..``amax`` (> 0), fp32 [bins]. Larger values count in the last bin."""
    return torch.histc((values.abs().float() / amax).clamp(max=1), bins, min=0, max=1)


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


def squared_errors(magnitudes: Tensor, thresholds: np.ndarray) -> np.ndarray:
    """Mean squared error, fp64 [m], of ``magnitudes`` (fp32 [n], >= 0) quantized within each of ``thresholds`` [m]."""
    ordered = np.sort(magnitudes.numpy())  # torch takes three times as long
    sums = np.concatenate([[0.0], ordered.cumsum(dtype=np.float64)])
    step = thresholds / QMAX
    boundary = step[:, None] * (np.arange(1, QMAX + 1) - 0.5)
    below = ordered.searchsorted(boundary.astype(np.float32))
    excess = sums[-1] - sums[below] - boundary * (len(ordered) - below)
    return (np.square(ordered, dtype=np.float64).sum() - 2 * step * excess.sum(1)) / len(ordered)


def within_amax(observer: Observer) -> Observer:
    """``observer``, which is given magnitudes (fp32 [n], not all zero), ``amax`` and its options, for any values.

    Never more than ``amax``; ``amax`` itself where the sample is empty, all zero or not finite, or the observer says 0.
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
    """``amax``."""
    return amax


@within_amax
def percentile(magnitudes: Tensor, amax: float, percent: float = PERCENTILE, **_) -> float:
    """The smallest value that ``percent`` % of them do not exceed; 99.99: the peak of a sample of less than 10 000."""
    return magnitudes.kthvalue(math.ceil(len(magnitudes) * percent / 100)).values.item()


def quantization_errors(magnitudes: Tensor, thresholds: Tensor, form: Format, counts: Tensor | None = None) -> Tensor:
    """Mean squared error, fp64 [m], of ``magnitudes`` [n] quantized within each of ``thresholds`` [m], by doing it.

    Of numbers around 1, where fp16 rounds a scale as everywhere; ``counts`` [n] is how often each of them is there.
    """
    weights = torch.ones_like(magnitudes) if counts is None else counts
    errors = [
        ((fake_quantize(form, magnitudes, threshold) - magnitudes).square().double() @ weights.double()).item()
        for threshold in thresholds
    ]
    return torch.tensor(errors).double() / weights.double().sum()


@within_amax
def histogram_error(magnitudes: Tensor, amax: float, form: Format = FORMATS["int8"], **_) -> float:
    """Of every STRIDE-th of the ranges of LEVELS to BINS bins the one with the smallest error at the bins' middles.

    That is PyTorch's HistogramObserver and Quark's ``histogram``, with the format's own rounding in place of a width.
    """
    peak = magnitudes.max().item()
    middles, shares = (torch.arange(BINS) + 0.5) / BINS, torch.arange(BINS, LEVELS - 1, -STRIDE) / BINS
    best = quantization_errors(middles, shares, form, histogram(magnitudes, peak)).argmin()  # of equal ones the widest
    return peak * shares[best].item()


@within_amax
def entropy(magnitudes: Tensor, amax: float, **_) -> float:
    """The range of LEVELS to BINS bins with the smallest divergence, of equal ones the widest.

    The bin at zero gets the count of its neighbour, as in the calibrators above: zeros are exact in any range.
    """
    peak = magnitudes.max().item()
    counts = histogram(magnitudes, peak).double()
    counts[0] = counts[1]
    divergence = kl_divergences(counts)
    best = (divergence <= divergence.min() + 1e-12).nonzero()[-1].item()
    return peak * (LEVELS + best) / BINS


@within_amax
def mse(magnitudes: Tensor, amax: float, form: Format = FORMATS["int8"], **_) -> float:
    """The one of ``amax`` and SHARES of the peak with the smallest mean squared error, of equal ones the widest.

    The closed form is INT8's. A floating-point format repeats itself with every factor of two, so shares down to a half
    are all there is to try.
    """
    thresholds = np.concatenate([[amax], magnitudes.max().item() * SHARES])
    if form.name == "int8":
        return float(thresholds[squared_errors(magnitudes, thresholds).argmin()])
    peak = magnitudes.max().item()
    shares = torch.from_numpy(thresholds[thresholds >= peak / 2] / peak).float()
    seen = magnitudes[:: -(-len(magnitudes) // SEEN)] / peak
    return peak * shares[quantization_errors(seen, shares, form).argmin()].item()


# Each takes ``values`` (fp32, any shape: a sample of the layer's inputs), ``amax`` (the largest magnitude of the whole
# calibration, which the sample may lack), ``form``, the format, and ``percent``, the percentile's. It returns the range
# to quantize with, in (0, amax].
OBSERVERS: dict[str, Observer] = {
    "min_max": min_max,
    "percentile": percentile,
    "histogram": histogram_error,
    "entropy": entropy,
    "mse": mse,
}
