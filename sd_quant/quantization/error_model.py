"""The error of a layer's output when the layer is quantized, in one denoising step and over all of them.

An input is rounded differently in every step, so its errors add up like noise. A weight is rounded once, so its error
adds up in full. The error of the sum of all steps' outputs, relative to sqrt(steps) times the norm of one, is therefore

    sqrt(|error from the input|^2 + steps * |error from the weight|^2) / |output|

The road not taken is the error of a single output, whose best alpha moves too much of the input's outliers into the
weights (measured on images of two checkpoints). This holds even for the text's key and value, whose input is the same
in every step: with its error counted in full, alpha=auto lost 0.2 and 0.5 dB.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.row_chunks import row_chunks
from sd_quant.quantization.statistics import LayerStatistics


def with_output_errors(layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics) -> LayerAssignment:
    """``layer`` with its errors on the sampled inputs: of one output, and for a linear also over all steps."""
    conv = statistics.kind == "conv"
    steps = 1 if conv else len(statistics.amax)
    output_error, accumulated_error = output_errors(layer, weight, statistics.rows.values, steps)
    return replace(layer, output_error=output_error, accumulated_error=None if conv else accumulated_error)


def output_errors(
    layer: LayerAssignment, weight: Tensor, sample: Tensor, steps: int
) -> tuple[float | None, float | None]:
    """The error of one output, |quantized output - output| / |output|, and the error accumulated over ``steps``.

    ``weight`` [out, in...] is the checkpoint's. ``sample`` [n, in] are inputs, or flattened patches for a convolution.
    Both errors are None when the sample is empty or the output all zero.
    """
    inputs = sample.float()
    if layer.pre_quant_scale is not None:
        inputs = inputs * layer.pre_quant_scale
    fake_quantized = inputs
    if layer.activation_format is not None:
        fake_quantized = layer.rounded_input(inputs)
    both = torch.cat([inputs, fake_quantized - inputs])  # a product of both takes less time than two
    squares = torch.zeros(4, dtype=torch.float64)  # of the output, its error, the input's part of that and the weight's
    for chunk, part in row_chunks(weight, layer):
        smoothed = rewritten(chunk, part)
        weight_error = part.rounded_weight(smoothed).sub_(smoothed)
        output, from_input = (both @ smoothed.T).chunk(2)
        from_weight, from_both = (both @ weight_error.T).chunk(2)
        error = from_weight + from_both + from_input
        if part.bias is not None:
            error += part.bias.half().float() - part.bias
        if part.low_rank is not None:
            up, down = part.low_rank
            output = output + (inputs @ down.float().T) @ up.float().T
        squares += torch.stack([term.square().sum().double() for term in (output, error, from_input, from_weight)])
    output, error, from_input, from_weight = squares.tolist()
    if not output:
        return None, None
    return math.sqrt(error / output), math.sqrt((from_input + steps * from_weight) / output)
