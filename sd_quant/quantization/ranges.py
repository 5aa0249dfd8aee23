"""The ranges that a layer is quantized with: of its weight from the weight, of its input from calibration.

Most inputs of convolutions come from SiLU, which is never below -0.28. Symmetric codes give as many levels to what lies
below zero as to what lies above, so half of them are never used. Such an input is shifted: what is quantized, with
symmetric codes, is the input minus a constant, and the convolution's answer to that constant is added behind it. That
is asymmetric quantization (Jacob et al. 2018, equation 1) with the zero point taken out of the arithmetic, so that it
runs where only symmetric codes do. The inputs of linears are about as large on both sides and gain nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, bias_of_shift, rewritten
from sd_quant.quantization.formats import FORMATS, Format, fake_quantize
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.row_chunks import layer_of_rows, output_amax, row_chunks

SHIFT_PAYS = 0.9  # a shift that leaves more of the squared error is not worth its operations
TRIED_SCALES = 8  # of each output channel, neighbours in fp16


@dataclass(frozen=True, slots=True)
class InputRange:
    """What an input is quantized with. ``amax`` is the largest magnitude of the input minus the shift."""

    amax: float
    zero_point: int = 0


def observed_range(values: Tensor, amax: float, role: str, recipe: Recipe) -> InputRange:
    """The range that the recipe's observer chooses for the input of a layer of this role.

    ``values`` are a sample of the input, ``amax`` is its largest magnitude in the whole calibration. That is also the
    result when inputs of this role stay in high precision. The input of a convolution is shifted where the recipe says
    so and the sample's squared error falls to ``SHIFT_PAYS`` of what it is without.
    """
    name = recipe.formats_of(role).activation
    if name is None:
        return InputRange(amax)
    fmt, observer = FORMATS[name], OBSERVERS[recipe.observer_of(role)]
    observe = partial(observer, fmt=fmt, percent=recipe.observer_percentile)
    symmetric = InputRange(observe(values, amax))
    if role != "conv" or not recipe.shift or not values.numel() or not amax:
        return symmetric
    try:
        shifted = shifted_range(values, amax, fmt, observe)
        pays = squared_error(values, shifted, fmt) <= SHIFT_PAYS * squared_error(values, symmetric, fmt)
    except OverflowError:  # a scale that cannot be stored, which ``with_ranges`` refuses
        return symmetric
    return shifted if pays else symmetric


def shifted_range(values: Tensor, amax: float, fmt: Format, observe: Callable[..., float]) -> InputRange:
    """The range whose lowest code is for the smallest of ``values``, or for zero if that is above it.

    The observer judges how far the values lie above it, as the magnitudes that it expects, with all levels of the
    format on one side.
    """
    lowest = max(min(values.min().item(), 0.0), -amax)
    levels = int(2 * fmt.largest_code + 1)
    width = observe((values - lowest).clamp(min=0), amax - lowest, levels=levels)
    half = width * fmt.largest_code / levels
    (scale,) = fmt.scales(values, torch.tensor(half))
    codes_below_zero = round(-lowest / scale.item())
    return InputRange(half, min(codes_below_zero - int(fmt.largest_code) - 1, int(fmt.largest_code)))


def squared_error(values: Tensor, chosen: InputRange, fmt: Format) -> float:
    """The sum of the squared errors of ``values`` quantized with this range."""
    amax = torch.tensor(chosen.amax)
    shift = -chosen.zero_point * fmt.scales(values, amax)[0].item()
    return (fake_quantize(fmt, values - shift, amax) + shift - values).square().sum().item()


def with_weight_range(layer: LayerAssignment, weight: Tensor) -> LayerAssignment:
    """``layer`` with the range of its rewritten weight. ``weight`` is the checkpoint's."""
    amax = output_amax(weight, layer)
    return replace(layer, weight_amax=amax if layer.weight_axis == 0 else amax.amax(0, keepdim=True))


def with_storable_bias(layer: LayerAssignment, weight: Tensor, bias: Tensor | None) -> LayerAssignment:
    """``layer``, whose input is shifted, with a scale of each output channel with which fp16 holds its bias well.

    What a convolution makes of the shift may be thirty times as large as its output. Rounding that to fp16 would be a
    third of the layer's error, and the same in every step. It moves with the scale, so among the smallest scale that
    clips nothing and the next few in fp16, at most 0.8 % larger, the one is taken whose bias is nearest to fp16. The
    road not taken is a second addition of what fp16 loses: runtimes fold it into the first one, in fp16.
    """
    fmt, chosen, row = FORMATS[layer.format], [], 0
    for chunk, part in row_chunks(weight, layer):
        smoothed = rewritten(chunk, part)
        own = 0.0 if bias is None else bias[row : row + len(chunk)].float()
        row += len(chunk)
        (smallest,) = part.weight_scales(smoothed)
        scales, errors, codes = [], [], torch.empty_like(smoothed)
        for step in range(TRIED_SCALES):
            scale = (smallest.half().view(torch.int16) + step).view(torch.float16).float()
            torch.div(smoothed, scale, out=codes).round_()  # no scale clips, so these are the codes
            exact = bias_of_shift(codes, scale, layer.shift) + own
            scales.append(scale.flatten())
            errors.append((exact.half().float() - exact).abs())
        nearest = torch.stack(errors).argmin(0, keepdim=True)
        chosen.append(torch.stack(scales).gather(0, nearest)[0])
    return replace(layer, weight_amax=torch.cat(chosen) * fmt.largest_code)


def with_ranges(layer: LayerAssignment, weight: Tensor, chosen: InputRange, recipe: Recipe) -> LayerAssignment:
    """``layer`` with the recipe's formats for its role, the range of its weight, and its input's, ``chosen``.

    Raises SdQuantError when the input's range is zero, or when a scale cannot be stored.
    """
    formats = recipe.formats_of(layer.role)
    if chosen.amax == 0 and formats.activation is not None:
        raise SdQuantError(
            f"layer {layer.name} only ever saw zeros during calibration, so its input has no scale; "
            "calibrate with more prompts or a lower quant_level"
        )
    layer = replace(
        layer,
        format=formats.weight,
        activation_format=formats.activation,
        weight_axis=0 if recipe.per_channel and FORMATS[formats.weight].block is None else None,
        activation_amax=chosen.amax,
        activation_zero_point=chosen.zero_point,
        reason=None,
    )
    layer = with_weight_range(layer, weight)
    try:
        layer.weight_scale, layer.activation_scale  # noqa: B018
        for chunk, part in row_chunks(weight[:1], layer_of_rows(layer, slice(1))):
            part.weight_scales(rewritten(chunk, part))
    except OverflowError as error:
        raise SdQuantError(
            f"layer {layer.name} cannot be quantized: {error}; keep it out with a lower quant_level"
        ) from error
    return layer
