"""The observer ``percentile``: a fixed share of the sample is not clipped."""

import math

from torch import Tensor

from sd_quant.quantization.observers.sample import within_amax

PERCENT = 99.99


@within_amax
def quantile(magnitudes: Tensor, amax: float, percent: float = PERCENT, **_) -> float:
    """The smallest magnitude that ``percent`` % do not exceed; at 99.99 the peak of a sample of less than 10 000."""
    return magnitudes.kthvalue(math.ceil(len(magnitudes) * percent / 100)).values.item()
