"""The rows of attentions, whose two matrix products quant_level 4 quantizes: query by key, and softmax by value."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import LayerStatistics

HEAD_WIDTH_MULTIPLE = 16  # only heads that are a multiple of this wide are quantized, as in ModelOpt
HEADROOM = 2.0


def assign_attention(
    name: str,
    head_width: int,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
) -> LayerAssignment:
    """The row of the attention ``name``. ``assignment`` holds the rows of its linears."""
    row = LayerAssignment(name, "attention", (head_width,), reason=reason_kept("attention", recipe.quant_level))
    if row.reason is None and head_width % HEAD_WIDTH_MULTIPLE:
        row = replace(row, reason=f"its heads are {head_width} wide, no multiple of {HEAD_WIDTH_MULTIPLE}")
    if row.reason is None:
        amax = attention_amax(name, head_width, assignment, weight_of, statistics)
        row = replace(row, activation_format=recipe.enable.attention, attention_amax=amax)
    return row


def attention_amax(
    name: str,
    head_width: int,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
) -> tuple[float, float, float]:
    """Ranges of query, key and value as they are multiplied, computed from the sampled inputs of their linears.

    Query and key are each divided by the fourth root of the head's width, as in torch's scaled_dot_product_attention.
    The sample may lack the largest values, so a range is ``HEADROOM`` times what the sample gives. In a floating-point
    format a range that is twice too large costs the smallest of 15 binades and nothing else.
    """
    ranges = []
    for letter in "qkv":
        layer = assignment[f"{name}.to_{letter}"]
        output = statistics[layer.name].rows.values.float() @ weight_of(layer.name).float().T
        if layer.output_scale is not None:
            output = output * layer.output_scale
        ranges.append(HEADROOM * output.abs().max().item() * (1 if letter == "v" else head_width**-0.25))
    return ranges[0], ranges[1], ranges[2]
