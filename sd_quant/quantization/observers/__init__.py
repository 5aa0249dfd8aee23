"""Observers choose the range of an activation from a sample of its values.

INT8 with range t rounds x to ``s * clamp(round(x / s), -127, 127)`` with ``s = t / 127``. A smaller t gives finer steps
and clips more values. The observers differ in the t that they call best:

| observer   | range                                                                                        |
|------------|----------------------------------------------------------------------------------------------|
| min_max    | the largest value of the whole calibration: nothing is clipped                               |
| percentile | a given percentage of the sample lies within it                                              |
| histogram  | rounding and clipping the middles of a histogram's bins has the smallest squared error       |
| entropy    | 128 levels lose the least information of the sample's histogram (Migacz, GTC 2017)           |
| mse        | rounding and clipping the sample has the smallest squared error                              |

The sample is smoothed like the layer's input, so another observer costs no further calibration. All but ``min_max`` go
by the sample's own peak and not by the largest magnitude of the whole calibration: a histogram that reached to an
outlier which the sample lacks would hold all the rest in a few bins. E4M3 is about as precise far below the range as
close to it, so it gains little from any of them.

To add an observer, write ``sd_quant/quantization/observers/<name>.py`` with a function that takes the arguments of
``Observer.__call__``, and one row in ``OBSERVERS``. This file imports no torch, because knobs are checked without it.
"""

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sd_quant.quantization.formats import Format

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observer:
    """One way of choosing the range of an activation."""

    function: str  # "module:function", imported when it is called
    one_scale: bool = False  # whether it only works for formats with one scale, because it tries ranges on the sample
    equal_levels: bool = False  # whether it only works for levels at equal distances, as those of integers are

    def __call__(self, values: "Tensor", amax: float, **options) -> float:
        """The range to quantize with, in (0, ``amax``].

        ``values``: fp32 of any shape, a sample of the layer's inputs. ``amax``: the largest magnitude of the whole
        calibration, which the sample may lack. Options: ``fmt``, the input's format (INT8 by default); ``levels``, how
        many equal levels it has above zero (127 by default); and ``percent``, how much of the sample the observer
        ``percentile`` does not clip.
        """
        return pkgutil.resolve_name(self.function)(values, amax, **options)

    def judges(self, fmt: Format) -> bool:
        """Whether the observer can choose ranges for this format."""
        return (fmt.static_scale or not self.one_scale) and (fmt.equal_levels or not self.equal_levels)


OBSERVERS = {
    "min_max": Observer(f"{__name__}.min_max:min_max"),
    "percentile": Observer(f"{__name__}.quantile:quantile"),
    "histogram": Observer(f"{__name__}.histogram:histogram", one_scale=True),
    "entropy": Observer(f"{__name__}.entropy:entropy", one_scale=True, equal_levels=True),
    "mse": Observer(f"{__name__}.mse:mse", one_scale=True),
}
