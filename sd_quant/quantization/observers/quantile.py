"""The observer ``percentile``, which clips a fixed part of the sample."""

import math

from torch import Tensor

from sd_quant.quantization.observers.sample import within_amax

PERCENT = 99.99


@within_amax
def quantile(magnitudes: Tensor, amax: float, percent: float = PERCENT, **_) -> float:
    """The smallest magnitude that ``percent`` % of the sample do not exceed.

    At 99.99 % this is the peak of any sample of less than 10 000 values.
    """
    return magnitudes.kthvalue(math.ceil(len(magnitudes) * percent / 100)).values.item()
