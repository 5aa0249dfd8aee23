"""Quantization of convolutions: no smoothing; asymmetric inputs where these reduce the output's error.

Most inputs come from SiLU, which is never below -0.28, so nearly half of the codes of symmetric INT8 would be unused. A
constant (the shift) is subtracted from the input before symmetric quantization, and the convolution's response to it is
added to the bias: asymmetric quantization (Jacob et al. 2018, equation 1) on kernels for symmetric INT8.
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
    """Return the assignment of a convolution, with a shift if the recipe allows it and it reduces the output's error.

    A shift must reduce the error on the sampled inputs, with the bias in fp16, to at most ``SHIFT_PAYS`` of the error
    without a shift. The range is the percentile calibrator's, or a smaller range that the observer chooses.
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
    """Compute the asymmetric range of a convolution's input: the lowest code represents min(0, smallest value).

    ``values`` are a sample of the input, ``amax`` its largest magnitude in the calibration. The recipe's observer gets
    the distances from the smallest value. Raises OverflowError when fp16 cannot hold the scale.
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
    """Add the response to the input's shift to the bias, and choose weight scales with which it rounds well to fp16.

    The response to the shift may be thirty times as large as the output, and its rounding to fp16 a third of the
    layer's error. So each output channel tries the smallest scale that clips nothing and the next few in fp16, at most
    0.8 % larger, and keeps the scale whose bias has the smallest rounding error. Alternative not taken: add the
    rounding error separately; runtimes fold both additions into one, in fp16.
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
    """Compute the output of a convolution, fp32 [out], for an input of the constant ``shift`` everywhere.

    ``codes`` of the quantized weight are [out, ...], ``scale`` [out, 1...]. Padding must be quantized from zero. The
    sum of up to 100,000 codes is exact in fp32.
    """
    return shift * scale.flatten() * codes.flatten(1).sum(1)
