"""The ranges that a layer is quantized with: of its weight from the weight, of its input from calibration."""

from dataclasses import replace

from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.row_chunks import layer_of_rows, output_amax, row_chunks


def observed_amax(values: Tensor, amax: float, role: str, recipe: Recipe) -> float:
    """The range that the recipe's observer chooses for the input of a layer of this role.

    ``values`` are a sample of the input, ``amax`` is its largest magnitude in the whole calibration. That is also the
    result when inputs of this role stay in high precision.
    """
    name = recipe.formats_of(role).activation
    if name is None:
        return amax
    return OBSERVERS[recipe.observer](values, amax, fmt=FORMATS[name], percent=recipe.observer_percentile)


def with_weight_range(layer: LayerAssignment, weight: Tensor) -> LayerAssignment:
    """``layer`` with the range of its rewritten weight. ``weight`` is the checkpoint's."""
    amax = output_amax(weight, layer)
    return replace(layer, weight_amax=amax if layer.weight_axis == 0 else amax.amax(0, keepdim=True))


def with_ranges(layer: LayerAssignment, weight: Tensor, activation_amax: float, recipe: Recipe) -> LayerAssignment:
    """``layer`` with the recipe's formats for its role, the range of its weight, and this range of its input.

    Raises SdQuantError when the input's range is zero, or when a scale cannot be stored.
    """
    formats = recipe.formats_of(layer.role)
    if activation_amax == 0 and formats.activation is not None:
        raise SdQuantError(
            f"layer {layer.name} only ever saw zeros during calibration, so its input has no scale; "
            "calibrate with more prompts or a lower quant_level"
        )
    layer = replace(
        layer,
        format=formats.weight,
        activation_format=formats.activation,
        weight_axis=0 if recipe.per_channel and FORMATS[formats.weight].block is None else None,
        activation_amax=activation_amax,
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
