"""The rows of convolutions. They are not smoothed; their inputs are shifted where that improves the output.

Most inputs come from SiLU, which is never below -0.28, so nearly half of symmetric codes would be unused. A shifted
input is quantized, with symmetric codes, minus a constant, and the convolution's response to that constant is added to
its bias: asymmetric quantization (Jacob et al. 2018, equation 1) that runs wherever symmetric codes do.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.row_chunks import row_chunks, with_output_error
from sd_quant.quantization.statistics import LayerStatistics

SHIFT_PAYS = 0.95  # a shift must reduce the output's error to this part of it, to be worth its operations
TRIED_SCALES = 8  # of each output channel, neighbours in fp16


def assign_convolution(
    layer: LayerAssignment, weight: Tensor, bias: Tensor | None, statistics: LayerStatistics, recipe: Recipe
) -> LayerAssignment:
    """The row of a convolution, with a shift if the recipe allows it and the output errs less by ``SHIFT_PAYS``.

    The error is on the sampled inputs and includes the rounding of the bias to fp16. The observer may choose a smaller
    range than the percentile calibrator.
    """
    calibrator = PERCENTILE_CALIBRATORS[recipe.percentile_calibrator]
    amax = calibrator(statistics.amax, recipe.percentile, recipe.collect_method, recipe.batch_size)
    values = statistics.rows.values.float()
    symmetric = InputRange(observed_range(values, amax, layer.role, recipe))
    plain = with_output_error(with_ranges(layer, weight, symmetric, recipe), weight, statistics)
    if not recipe.shift or not plain.output_error:
        return plain
    shifted = with_ranges(layer, weight, shifted_range(values, amax, recipe), recipe)
    if not shifted.activation_zero_point:
        return plain
    shifted = with_output_error(with_shifted_bias(shifted, weight, bias), weight, statistics)
    return shifted if shifted.output_error <= SHIFT_PAYS * plain.output_error else plain


def shifted_range(values: Tensor, amax: float, recipe: Recipe) -> InputRange:
    """The range of a convolution's input that maps the lowest code to the smallest of ``values``, at most zero.

    Arguments as of ``observed_range``, whose observer gets distances from the smallest value as magnitudes, with all
    levels on one side. Raises OverflowError when fp16 cannot hold the scale.
    """
    fmt = FORMATS[recipe.formats_of("conv").activation]
    lowest = max(min(values.min().item(), 0.0), -amax)
    levels = int(2 * fmt.largest_code + 1)
    width = observed_range((values - lowest).clamp(min=0), amax - lowest, "conv", recipe, levels=levels)
    half = width * fmt.largest_code / levels
    (scale,) = fmt.scales(values, torch.tensor(half))
    codes_below_zero = round(-lowest / scale.item())
    return InputRange(half, min(codes_below_zero - int(fmt.largest_code) - 1, int(fmt.largest_code)))


def with_shifted_bias(layer: LayerAssignment, weight: Tensor, bias: Tensor | None) -> LayerAssignment:
    """``layer``, whose input is shifted, with the response added to its bias, and scales for which fp16 holds it well.

    The response to the shift may be thirty times as large as the output, and its rounding to fp16 a third of the
    layer's error. So each channel takes, of the smallest scale that clips nothing and the next few in fp16, at most
    0.8 % larger, the one whose bias is nearest to fp16. The road not taken is a second addition of the rounding error:
    runtimes fold it into the first, in fp16.
    """
    fmt, scales, biases, row = FORMATS[layer.format], [], [], 0
    for chunk, part in row_chunks(weight, layer):
        smoothed = rewritten(chunk, part)
        own = 0.0 if bias is None else bias[row : row + len(chunk)].float()
        row += len(chunk)
        (smallest,) = part.weight_scales(smoothed)
        tried, exact, codes = [], [], torch.empty_like(smoothed)
        for step in range(TRIED_SCALES):
            scale = (smallest.half().view(torch.int16) + step).view(torch.float16).float()
            torch.div(smoothed, scale, out=codes).round_()  # no scale clips, so these are the codes
            tried.append(scale.flatten())
            exact.append(bias_of_shift(codes, scale, layer.shift) + own)
        errors = [(each.half().float() - each).abs() for each in exact]
        nearest = torch.stack(errors).argmin(0, keepdim=True)
        scales.append(torch.stack(tried).gather(0, nearest)[0])
        biases.append(torch.stack(exact).gather(0, nearest)[0])
    return replace(layer, weight_amax=torch.cat(scales) * fmt.largest_code, bias=torch.cat(biases))


def bias_of_shift(codes: Tensor, scale: Tensor, shift: float) -> Tensor:
    """The response of a convolution, fp32 [out], to a constant input of ``shift``, the same for every output.

    ``codes`` of the weight are [out, ...], ``scale`` [out, 1...]. Padding has the code of zero. The sum of codes is
    exact in fp32: 2^24 is more than 100,000 codes.
    """
    return shift * scale.flatten() * codes.flatten(1).sum(1)
