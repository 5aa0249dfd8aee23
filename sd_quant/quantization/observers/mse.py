"""The observer that makes the squared error of the sample smallest, rounding and clipping together.

ModelOpt's of that name measures the error at the centres of bins that may be as wide as a step. Here the values are
sorted, and the error of a threshold is exact: the levels are ks, values above b_k = (k - 1/2) s go to level k or
higher, so that

    sum (x - quantized x)^2  =  sum x^2  -  2 s  sum_k  sum over |x| > b_k of (|x| - b_k),    k = 1 .. 127

where the inner sum is one search and one prefix sum. Not taken: the level -128, which has no positive counterpart. It
can only make an error smaller, so ``mse`` never does worse than ``min_max`` with it either.
"""

import math

import numpy as np
import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.formats.int8 import QMAX
from sd_quant.quantization.observers.sample import quantization_errors, within_amax

SEEN = 2**16  # values of a sample that are looked at where there is no closed form

# Thresholds as shares of the peak, 1 % apart: the error is flat around the best one. Down to half a step of the
# unclipped range: a narrower one pays only where that range would round nearly all values to zero.
SHARES = 0.99 ** np.arange(math.log(2 * QMAX) / -math.log(0.99))


def squared_errors(magnitudes: Tensor, thresholds: np.ndarray, levels: float = QMAX) -> np.ndarray:
    """Mean squared error, fp64 [m], of ``magnitudes`` (fp32 [n], >= 0) quantized within each of ``thresholds`` [m].

    The codes are whole numbers up to ``levels``.
    """
    ordered = np.sort(magnitudes.numpy())  # torch takes three times as long
    sums = np.concatenate([[0.0], ordered.cumsum(dtype=np.float64)])
    step = thresholds / levels
    boundary = step[:, None] * (np.arange(1, levels + 1) - 0.5)
    below = ordered.searchsorted(boundary.astype(np.float32))
    excess = sums[-1] - sums[below] - boundary * (len(ordered) - below)
    return (np.square(ordered, dtype=np.float64).sum() - 2 * step * excess.sum(1)) / len(ordered)


@within_amax
def mse(magnitudes: Tensor, amax: float, fmt: Format = FORMATS["int8"], **_) -> float:
    """The one of ``amax`` and SHARES of the peak with the smallest mean squared error, of equal ones the widest.

    Equal levels have the closed form. A floating-point format repeats itself with every factor of two, so shares down
    to a half are all there is to try.
    """
    thresholds = np.concatenate([[amax], magnitudes.max().item() * SHARES])
    if fmt.equal_levels:
        return float(thresholds[squared_errors(magnitudes, thresholds, fmt.largest_code).argmin()])
    peak = magnitudes.max().item()
    shares = torch.from_numpy(thresholds[thresholds >= peak / 2] / peak).float()
    seen = magnitudes[:: -(-len(magnitudes) // SEEN)] / peak
    return peak * shares[quantization_errors(seen, shares, fmt).argmin()].item()
