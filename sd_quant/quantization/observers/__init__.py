"""Observers: the range of an activation from a sample of its values, clipping some so that the rest gets finer steps.

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
from any of them.

To add one, write ``sd_quant/quantization/observers/<name>.py`` with a function that takes what ``Observer`` is called
with, and its row in ``OBSERVERS``. This file imports no torch, because knobs are checked without it.
"""

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sd_quant.quantization.formats import Format

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observer:
    function: str  # "module:function", imported when it is called
    one_scale: bool = False  # it tries ranges on the sample, so it cannot judge a format with a scale per block
    equal_levels: bool = False  # it takes levels to be equally far apart, as those of integers are

    def __call__(self, values: "Tensor", amax: float, **options) -> float:
        """The range to quantize with, in (0, ``amax``].

        ``values``: fp32 of any shape, a sample of the layer's inputs. ``amax``: the largest magnitude of the whole
        calibration, which the sample may lack. Options: ``fmt``, the format (by default INT8), and
        ``percent``, the share that the observer ``percentile`` does not clip.
        """
        return pkgutil.resolve_name(self.function)(values, amax, **options)

    def judges(self, fmt: Format) -> bool:
        """Whether it can choose the range of inputs in this format."""
        return (fmt.static_scale or not self.one_scale) and (fmt.equal_levels or not self.equal_levels)


OBSERVERS = {
    "min_max": Observer(f"{__name__}.min_max:min_max"),
    "percentile": Observer(f"{__name__}.quantile:quantile"),
    "histogram": Observer(f"{__name__}.histogram:histogram", one_scale=True),
    "entropy": Observer(f"{__name__}.entropy:entropy", one_scale=True, equal_levels=True),
    "mse": Observer(f"{__name__}.mse:mse", one_scale=True),
}
