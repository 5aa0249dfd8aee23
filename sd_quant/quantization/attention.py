"""The rows of attentions, whose two matrix products quant_level 4 quantizes: query by key, and softmax by value.

A floating-point format (FP8) quantizes query, key, value and the softmax, each with one scale. Integers cannot: of 4096
equal probabilities none is a code of a scale that holds a probability of 1. So where the format has equal levels

- the largest score of a row is subtracted first. exp(score - largest) has 1 in every row, whatever the row looks like.
  It gets unsigned codes, and what they add up to divides the second product (SageAttention, Zhang et al. 2024);
- the scores get codes too: a runtime that writes them down in fp32 spends more time on that than on the product;
- the mean of the keys is subtracted, which no softmax sees, because it is much of their range (SageAttention again);
- every head has ranges of its own. They are multiplications in front of the codes, which runtimes join with what
  stands there, because OpenVINO's integer products take no scale for each head;
- a cross-attention stays in high precision: the first token of a text is up to 80 times as large as the others, which
  would be left with few codes, and its products are small.

A joint attention (Stable Diffusion 3) has tokens of image and text, each ``Stream`` with linears and norms of its own,
and multiplies both at once, so ranges are of both. It is quantized in integers too: in each of its blocks a LayerNorm
stands in front of the text's linears, behind which the first token is as large as the others. The samples of both
streams are of one size, so the mean of the keys lies half-way between their means, and neither has most of the range.

Measured on two checkpoints with 16 images each: as close to full precision as level 3, within 0.4 dB, for headrooms
from 1 to 2 and with one scale or one for each head. The latter is for networks whose heads differ more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import LayerStatistics

HEAD_WIDTH_MULTIPLE = 16  # only heads that are a multiple of this wide are quantized, as in ModelOpt
FLOAT_HEADROOM = 2.0  # a range that is twice too large costs the smallest of 15 binades and nothing else
INTEGER_HEADROOM = 1.25  # and here a third of a bit; the sample lacks the largest values
EXPONENTIAL_LEVELS = 255  # codes of exp(score - largest score), of which 0 is the smallest
SMALLEST_RANGE = 1e-3  # of a head, so that no factor of fp16 overflows
NORM_EPSILON = 1e-6  # of the norms of query and key, as diffusers' JointTransformerBlock states it


@dataclass(frozen=True)
class Stream:
    """The tokens of one kind that an attention reads: its layers for them, by their names in diffusers."""

    query: str
    key: str
    value: str
    query_norm: str  # an RMSNorm of each head, which only some attentions have
    key_norm: str


IMAGE = Stream("to_q", "to_k", "to_v", "norm_q", "norm_k")  # a cross-attention makes keys and values of text with it
TEXT = Stream("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")  # in a joint attention alone


def assign_attention(
    name: str,
    head_width: int,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    cross: bool,
    bias_of: Callable[[str], Tensor | None] = lambda name: None,
    gain_of: Callable[[str], Tensor | None] = lambda name: None,
) -> LayerAssignment:
    """The row of the attention ``name``. ``assignment`` holds the rows of its linears.

    ``cross``: key and value are the text's alone. The readers are those of ``derivation.derive``.
    """
    row = LayerAssignment(name, "attention", (head_width,), reason=reason_kept("attention", recipe.quant_level))
    fmt = recipe.enable.attention
    if row.reason is not None or fmt is None:
        return row
    if head_width % HEAD_WIDTH_MULTIPLE:
        return replace(row, reason=f"its heads are {head_width} wide, no multiple of {HEAD_WIDTH_MULTIPLE}")
    integers = FORMATS[fmt].equal_levels
    if integers and cross:
        return replace(row, reason="it reads the text, whose first token is far larger than the others")
    streams = [stream for stream in (IMAGE, TEXT) if f"{name}.{stream.query}" in assignment]
    sampled = [
        samples(name, stream, head_width, assignment, weight_of, statistics, not cross, bias_of, gain_of)
        for stream in streams
    ]
    query, key, value = (torch.cat(heads, dim=1) for heads in zip(*sampled, strict=True))
    if not integers:
        ranges = tuple(FLOAT_HEADROOM * heads.abs().amax().view(1) for heads in (query, key, value))
        return replace(row, activation_format=fmt, attention_amax=ranges)
    mean = key.mean(1, keepdim=True)
    key = key - mean
    scores = query @ key.transpose(1, 2)
    ranges = tuple(INTEGER_HEADROOM * heads.abs().amax((1, 2)) for heads in (query, key, value, scores))
    return replace(row, activation_format=fmt, attention_amax=ranges, key_mean=mean[:, 0].half().float())


def samples(
    name: str,
    stream: Stream,
    head_width: int,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    shared_rows: bool,
    bias_of: Callable[[str], Tensor | None],
    gain_of: Callable[[str], Tensor | None],
) -> list[Tensor]:
    """Query, key and value [heads, rows, head_width] as they are multiplied, of the sampled inputs of their linears.

    Query and key are each divided by the fourth root of the head's width, as in torch's scaled_dot_product_attention.
    With ``shared_rows`` the three linears read one tensor, and the rows of all their samples count for each.
    """
    layers = [assignment[f"{name}.{linear}"] for linear in (stream.query, stream.key, stream.value)]
    gains = (gain_of(f"{name}.{stream.query_norm}"), gain_of(f"{name}.{stream.key_norm}"), None)
    rows = [statistics[layer.name].rows.values.float() for layer in layers]
    if shared_rows:
        rows = [torch.cat(rows)] * 3
    found = []
    factors = (head_width**-0.25, head_width**-0.25, 1.0)
    for layer, inputs, gain, factor in zip(layers, rows, gains, factors, strict=True):
        bias = bias_of(layer.name)
        output = F.linear(inputs, weight_of(layer.name).float(), None if bias is None else bias.float())
        if layer.output_scale is not None:
            output = output * layer.output_scale
        heads = output.unflatten(1, (-1, head_width))
        if gain is not None:
            heads = F.rms_norm(heads, (head_width,), gain.float(), NORM_EPSILON)
        found.append(heads.transpose(0, 1) * factor)
    return found


@dataclass(frozen=True)
class HeadFactors:
    """What an attention in integers multiplies each head by, fp32 [heads, 1, 1] and exact in fp16, and its scales.

    Codes of a query are those of ``query_factor * query``, whose range is 1; so are scores' and values'.
    """

    query: Tensor
    key: Tensor
    logit: Tensor  # turns the product of scaled query and key back into a logit
    value: Tensor
    output: Tensor  # turns the mean of scaled values back into values
    unit_scale: float  # of codes whose range is 1
    key_scale: float
    exponential_scale: float


def head_factors(layer: LayerAssignment) -> HeadFactors:
    """The factors and scales of a row in integers, which simulation and export share."""
    query, key, value, scores = (amax.clamp(min=SMALLEST_RANGE) for amax in layer.attention_amax)
    exact = lambda factor: factor.half().float().view(-1, 1, 1)  # noqa: E731
    query_factor = exact(1 / query)
    key_factor = exact(query / scores)
    fmt = FORMATS[layer.activation_format]
    unit, keys = (fmt.scales(amax, amax)[0].item() for amax in (torch.ones(()), (key_factor[:, 0, 0] * key).amax()))
    return HeadFactors(
        query_factor, key_factor, exact(1 / (query_factor * key_factor)), exact(1 / value), exact(value),
        unit, keys, torch.tensor(1 / EXPONENTIAL_LEVELS).half().item(),
    )  # fmt: skip
