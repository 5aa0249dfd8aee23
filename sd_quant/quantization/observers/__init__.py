"""Observers: choose the range of an activation from a sample of its values. A smaller range has finer steps and clips
more values.

| observer | range                                                           |
|----------|-----------------------------------------------------------------|
| min_max  | the largest value of the whole calibration: nothing is clipped  |
| mse      | rounding and clipping the sample has the smallest squared error |

The sample is smoothed like the layer's input, so another observer costs no further calibration. E4M3 gains little from
``mse``. docs/extending.md explains how to add an observer. Alternatives not taken: a percentile, and a histogram's
error or entropy, measured in docs/lab_notebook.md. torch is not imported here: settings are checked without it.
"""

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sd_quant.quantization.formats import Format

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observer:
    """A method of choosing the range of an activation."""

    function: str  # "module:function", imported when it is called
    one_scale: bool = False  # whether it requires a format with one scale, because it tries ranges on the sample

    def __call__(self, values: "Tensor", amax: float, **options) -> float:
        """Return the range to quantize with, in (0, ``amax``].

        ``values``: fp32 of any shape, a sample of the layer's inputs. ``amax``: the largest magnitude of the whole
        calibration. Options: ``fmt``, the input's format (default: INT8); ``levels``, the number of equal levels above
        zero (default: the format's).
        """
        fmt = options.get("fmt")
        if fmt is not None and fmt.equal_levels:
            options = {"levels": int(fmt.largest_code)} | options
        return pkgutil.resolve_name(self.function)(values, amax, **options)

    def judges(self, fmt: Format) -> bool:
        """Return whether the observer can choose ranges for this format."""
        return fmt.static_scale or not self.one_scale


def min_max(values: "Tensor", amax: float, **_) -> float:
    """Return ``amax``, the largest magnitude of the whole calibration."""
    return amax


OBSERVERS = {"min_max": Observer(f"{__name__}:min_max"), "mse": Observer(f"{__name__}.mse:mse", one_scale=True)}
