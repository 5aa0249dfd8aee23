"""The error of a layer's output when the layer is quantized: of its weight, its input, and the bias of a shift.

The road not taken is the error of the sum of all denoising steps, in which a weight's error, the same in every step,
counts as many times as there are steps. While the search for alpha saw no clipping, it kept alpha small, and so was
better by chance; since unseen prompts count (``linears``), it loses 0.3 dB on average on a bench of ten checkpoints.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.row_chunks import row_chunks
from sd_quant.quantization.statistics import LayerStatistics


def with_output_error(layer: LayerAssignment, weight: Tensor, statistics: LayerStatistics) -> LayerAssignment:
    """``layer`` with the error of its output on the sampled inputs."""
    return replace(layer, output_error=output_error(layer, weight, statistics.rows.values))


def output_error(layer: LayerAssignment, weight: Tensor, sample: Tensor) -> float | None:
    """|quantized output - output| / |output|; None when the sample is empty or the output all zero.

    ``weight`` [out, in...] is the checkpoint's. ``sample`` [n, in] are inputs, or flattened patches for a convolution.
    """
    inputs = sample.float()
    if layer.pre_quant_scale is not None:
        inputs = inputs * layer.pre_quant_scale
    fake_quantized = inputs
    if layer.activation_format is not None:
        fake_quantized = layer.rounded_input(inputs)
    both = torch.cat([inputs, fake_quantized - inputs])  # a product of both takes less time than two
    squares = torch.zeros(2, dtype=torch.float64)  # of the error and of the output
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
        squares += torch.stack([term.square().sum().double() for term in (error, output)])
    of_error, of_output = squares.tolist()
    return math.sqrt(of_error / of_output) if of_output else None
