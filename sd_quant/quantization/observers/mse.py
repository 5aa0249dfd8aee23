"""The observer ``mse``: the range with which rounding and clipping the sample has the smallest squared error.

ModelOpt's mse calibrator measures the error at the centers of histogram bins that may be as wide as a step. Here the
values are sorted, and the error of a range is exact. The levels are k * s, and values above b_k = (k - 1/2) s are
rounded to level k or higher, so that

    sum (x - quantized x)^2  =  sum x^2  -  2 s  sum_k  sum over |x| > b_k of (|x| - b_k),    k = 1 .. 127

where the inner sum takes one binary search and one prefix sum. The level -128 is left out; it can only make an error
smaller.
"""

import math

import numpy as np
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format

LEVELS = 127  # of symmetric INT8 above zero

# The ranges that are tried, relative to the peak. They are 1 % apart, because the error is flat around the best one,
# and go down to half a step of the peak's range; a smaller one pays only where that range rounds nearly all to zero.
RANGES = 0.99 ** np.arange(math.log(2 * LEVELS) / -math.log(0.99))


def mse(values: Tensor, amax: float, fmt: Format = FORMATS["int8"], levels: int | None = None) -> float:
    """Return the range with the smallest mean squared error among ``amax`` and ``RANGES``; of equals, the widest.

    Returns ``amax`` if the sample is empty, all zero or not finite.
    """
    magnitudes = values.detach().cpu().float().abs().flatten()
    peak = magnitudes.max().item() if len(magnitudes) else 0.0
    if not 0 < peak < math.inf:  # false for NaN too
        return amax
    thresholds = np.concatenate([[amax], peak * RANGES])
    errors = squared_errors(magnitudes, thresholds, levels or int(fmt.largest_code))
    return min(float(thresholds[errors.argmin()]), amax)


def squared_errors(magnitudes: Tensor, thresholds: np.ndarray, levels: int = LEVELS) -> np.ndarray:
    """Compute the mean squared error, fp64 [m], of quantizing ``magnitudes`` (fp32 [n], >= 0) with each range [m].

    ``thresholds`` are the ranges; ``levels`` is the number of equal levels above zero.
    """
    ordered = np.sort(magnitudes.numpy())  # torch takes three times as long
    sums = np.concatenate([[0.0], ordered.cumsum(dtype=np.float64)])
    step = thresholds / levels
    boundary = step[:, None] * (np.arange(1, levels + 1) - 0.5)
    below = ordered.searchsorted(boundary.astype(np.float32))
    excess = sums[-1] - sums[below] - boundary * (len(ordered) - below)
    return (np.square(ordered, dtype=np.float64).sum() - 2 * step * excess.sum(1)) / len(ordered)
