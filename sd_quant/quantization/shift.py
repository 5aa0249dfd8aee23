"""Inputs of convolutions, quantized minus a constant.

Most of them come from SiLU, which is never below -0.28. Symmetric codes give as many levels to what lies below zero as
to what lies above, so half of them are never used. Such an input is shifted: what is quantized, with symmetric codes,
is the input minus a constant, and the convolution's answer to that constant is part of its bias. That is asymmetric
quantization (Jacob et al. 2018, equation 1) with the zero point taken out of the arithmetic, so that it runs where only
symmetric codes do. The inputs of linears are about as large on both sides and gain nothing.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.ranges import InputRange, observed_range
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.row_chunks import row_chunks

TRIED_SCALES = 8  # of each output channel, neighbours in fp16


def shifted_range(values: Tensor, amax: float, recipe: Recipe) -> InputRange:
    """The range of a convolution's input whose lowest code is for the smallest of ``values``, or for zero below it.

    ``values`` are a sample of the input, ``amax`` its largest magnitude in the whole calibration. The observer judges
    how far the values lie above that code, as the magnitudes that it expects, with all levels on one side.
    Raises OverflowError when fp16 cannot hold the scale.
    """
    fmt = FORMATS[recipe.formats_of("conv").activation]
    lowest = max(min(values.min().item(), 0.0), -amax)
    levels = int(2 * fmt.largest_code + 1)
    width = observed_range((values - lowest).clamp(min=0), amax - lowest, "conv", recipe, levels=levels)
    half = width * fmt.largest_code / levels
    (scale,) = fmt.scales(values, torch.tensor(half))
    codes_below_zero = round(-lowest / scale.item())
    return InputRange(half, min(codes_below_zero - int(fmt.largest_code) - 1, int(fmt.largest_code)))


def with_bias(layer: LayerAssignment, weight: Tensor, bias: Tensor | None) -> LayerAssignment:
    """``layer``, whose input is shifted, with its new bias, and weight scales with which fp16 holds that bias well.

    What a convolution makes of the shift may be thirty times as large as its output. Rounding that to fp16 would be a
    third of the layer's error, and the same in every step. It moves with the scale, so among the smallest scale that
    clips nothing and the next few in fp16, at most 0.8 % larger, the one is taken whose bias is nearest to fp16. The
    road not taken is a second addition of what fp16 loses: runtimes fold it into the first one, in fp16.
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
    """What a convolution with this weight makes of a ``shift`` of its input, fp32 [out].

    ``codes`` are [out, ...], ``scale`` [out, 1...]. It is the same for every output, where what pads the input has the
    code of zero. The sum of codes is exact, in integers or in fp32: 2^24 is more than 100,000 codes.
    """
    return shift * scale.flatten() * codes.flatten(1).sum(1)
