"""The size of each dynamic axis as a formula of the batch and the image's size, fitted to the sizes that were observed.

Calls are timed, and plans are built, for images that were never made, so the sizes of their inputs must be known. All
axes of diffusers' networks are proportional to the batch, the image's width, height or area, or a product of these,
perhaps behind a fixed number of tokens of text. What fits no such formula has the size that was observed.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod

from sd_quant.models.parts import Axis

OF = ("batch", "width*height", "width", "height", "batch*width*height", "batch*width", "batch*height")
GRAINS = (1, 4, 8, 16, 32, 64)  # pixels along a side of a latent, or of a token


def axis_of(sizes: Sequence[int], runs: Sequence[Mapping[str, int]]) -> Axis:
    """Returns the formula of an axis with these ``sizes`` in ``runs`` of a batch, a width and a height.

    The simplest formula that fits all is taken: proportional, then with a number added to it. Where none fits, the
    axis has the first size.
    """
    for of in OF:
        base = [prod(run[name] for name in of.split("*")) for run in runs]
        factor = Fraction(sizes[0], base[0])
        if len(set(sizes)) > 1 and all(factor * each == size for each, size in zip(base, sizes, strict=True)):
            return Axis(of, factor.numerator, factor.denominator, 0)
    for of in OF:
        base = [prod(run[name] for name in of.split("*")) for run in runs]
        dimensions = of.count("width") + of.count("height")
        for grain in GRAINS:
            factor = Fraction(1, grain**dimensions)
            offsets = {size - factor * each for each, size in zip(base, sizes, strict=True)}
            if len(offsets) == 1 and len(set(base)) > 1 and (offset := offsets.pop()) > 0 and offset.denominator == 1:
                return Axis(of, factor.numerator, factor.denominator, int(offset))
    return Axis("", 0, 1, sizes[0])
