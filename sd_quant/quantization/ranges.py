"""Ranges (amax) for quantization: of a weight from its values, of an input from calibration."""

import math
import pkgutil
from dataclasses import dataclass, replace

from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS, dividing
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.rotation import rotated
from sd_quant.quantization.row_chunks import layer_of_rows, output_amax, row_chunks

ROTATED_HEADROOM = 2.0  # only a global scale in floating point, for which headroom costs little, uses this range


@dataclass(frozen=True, slots=True)
class InputRange:
    """Range of a layer's input: ``amax``, its largest magnitude after subtracting the shift, and the zero point."""

    amax: float
    zero_point: int = 0


def observed_range(values: Tensor, amax: float, role: str, recipe: Recipe, **options) -> float:
    """Return the range that the recipe's observer chooses for the input of a layer of this role.

    ``values``: a sample of the input; ``amax``: its largest magnitude in the whole calibration, returned if inputs of
    this role stay in high precision. Inputs scaled per token have the range 1. Rotated inputs are known from the sample
    only, so their range has headroom; without a sample it is the maximum possible. ``options`` go to the observer.
    """
    name = recipe.formats_of(role).activation
    if name is None:
        return amax
    if recipe.scaled_per_token(role):
        return 1.0
    if values.ndim > 1 and (group := recipe.rotation_of(role, values.shape[-1])):
        values = rotated(values.float(), group)
        amax = ROTATED_HEADROOM * values.abs().max().item() if len(values) else math.sqrt(group) * amax
    observer = pkgutil.resolve_name(OBSERVERS[recipe.observer_of(role)])
    return observer(values, amax, fmt=FORMATS[name], **options)


def with_weight_range(layer: LayerAssignment, weight: Tensor) -> LayerAssignment:
    """Return ``layer`` with the unclipped range of its ``rewritten`` weight; ``weight`` is the checkpoint's."""
    amax = output_amax(weight, layer)
    return replace(layer, weight_amax=amax if layer.weight_axis == 0 else amax.amax(0, keepdim=True))


def with_ranges(layer: LayerAssignment, weight: Tensor, chosen: InputRange, recipe: Recipe) -> LayerAssignment:
    """Return ``layer`` with the recipe's formats for its role, its weight's range, and its input's range ``chosen``.

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
        format=dividing(formats.weight, math.prod(layer.weight_shape[1:])),
        activation_format=formats.activation,
        weight_axis=0 if recipe.per_channel and FORMATS[formats.weight].block is None else None,
        activation_amax=chosen.amax,
        activation_zero_point=chosen.zero_point,
        per_token=recipe.scaled_per_token(layer.role),
        rotation=recipe.rotation_of(layer.role, weight.shape[1]),
        reason=None,
    )
    layer = with_weight_range(layer, weight)
    try:
        layer.weight_scale, layer.activation_scale  # noqa: B018
        for chunk, part in row_chunks(weight[:1], layer_of_rows(layer, slice(1))):
            part.weight_scales(rotated(rewritten(chunk, part), layer.rotation))
    except OverflowError as error:
        raise SdQuantError(
            f"layer {layer.name} cannot be quantized: {error}; keep it out with a lower quant_level"
        ) from error
    return layer
