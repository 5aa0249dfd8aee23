"""Observers: choose the range of an activation from a sample of its values. A smaller range has finer steps and clips
more values.

| observer | range                                                           |
|----------|-----------------------------------------------------------------|
| min_max  | the largest value of the whole calibration: nothing is clipped  |
| mse      | rounding and clipping the sample has the smallest squared error |

The sample is smoothed like the layer's input, so another observer costs no further calibration. E4M3 gained little from
``mse``. docs/extending.md explains how to add an observer. Alternatives not taken: a percentile, and a histogram's
error or entropy, measured in docs/lab_notebook.md. torch is not imported here: settings are checked without it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def min_max(values: "Tensor", amax: float, **_) -> float:
    """Return ``amax``, the largest magnitude of the whole calibration."""
    return amax


# "module:function" by name, imported when it is called. The function returns the range to quantize with, in (0, amax].
# Its arguments: values, fp32 of any shape, a sample of the layer's inputs; amax, the largest magnitude of the whole
# calibration; by keyword fmt, the input's format, and maybe levels, the number of equal levels above zero (default: the
# format's).
OBSERVERS = {"min_max": f"{__name__}:min_max", "mse": f"{__name__}.mse:mse"}
