"""The rows of convolutions. They are not smoothed; their inputs are shifted where that makes the output better."""

from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.error_model import with_output_errors
from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.shift import shifted_range, with_bias
from sd_quant.quantization.statistics import LayerStatistics

SHIFT_PAYS = 0.95  # a shift that leaves more of the output's error is not worth its operations


def assign_convolution(
    layer: LayerAssignment, weight: Tensor, bias: Tensor | None, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """The row of a convolution.

    The percentile calibrator says how large its input gets, and the observer may choose a smaller range. Its input is
    shifted where the recipe says so and the error of the output, on the sampled inputs, falls to ``SHIFT_PAYS`` of what
    it is without. What fp16 rounds off the bias counts as error.
    """
    calibrator = PERCENTILE_CALIBRATORS[recipe.percentile_calibrator]
    amax = calibrator(statistics.amax, recipe.percentile, recipe.collect_method, recipe.batch_size)
    values = statistics.rows.values.float()
    symmetric = InputRange(observed_range(values, amax, layer.role, recipe))
    plain = with_output_errors(with_ranges(layer, weight, symmetric, recipe), weight, statistics)
    if not recipe.shift or not plain.output_error:
        return plain
    shifted = with_ranges(layer, weight, shifted_range(values, amax, recipe), recipe)
    if not shifted.activation_zero_point:
        return plain
    shifted = with_output_errors(with_bias(shifted, weight, bias), weight, statistics)
    return shifted if shifted.output_error <= SHIFT_PAYS * plain.output_error else plain
