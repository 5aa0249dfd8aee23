"""Quantization of attention's two matrix products, query by key and softmax by value (quant_level 4).

In FP8, query, key, value and softmax are quantized with one scale each. INT8 cannot represent a softmax: with a scale
that holds a probability of 1, all of 4096 equal probabilities round to zero. So in INT8 (docs/formats.md#attention has
the reasons):

- exp(score - largest score of the row) gets unsigned codes, whose sum divides the second product, and the mean of the
  keys is subtracted, which cancels in the softmax (SageAttention, Zhang et al. 2024);
- the scores are quantized too, and every head has its own ranges, as multiplications in front of the quantizers;
- a cross-attention stays in high precision, and so does an attention that rotates pairs of channels of queries and keys
  by a token's position (RoPE, in Flux), because sampled inputs do not record positions.

A joint attention (Stable Diffusion 3, Flux) has linears and norms for each ``Stream``; its ranges cover both streams.
A rotation keeps the norm of a pair, so in FP8 the largest norm is the range of Flux's queries and keys.

Measured on two checkpoints with 16 images each: level 4 is within 0.4 dB of level 3, for headrooms (factors of ranges)
from 1 to 2, and with one scale or one per head; the latter is meant for networks whose heads differ more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.parts import Heads
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import LayerStatistics

HEAD_WIDTH_MULTIPLE = 16  # only heads that are a multiple of this wide are quantized, as in ModelOpt
FLOAT_HEADROOM = 2.0  # the sample may miss the largest values; doubling the range costs only the lowest of 15 binades
INTEGER_HEADROOM = 1.25  # for the same reason; it costs a third of a bit
EXPONENTIAL_LEVELS = 255  # the largest code of exp(score - largest score)
SMALLEST_RANGE = 1e-3  # lower limit of a head's range, so that no factor overflows in fp16
NORM_EPSILON = 1e-6  # of the norms of query and key, as in diffusers' JointTransformerBlock and blocks of Flux


@dataclass(frozen=True)
class Stream:
    """Names, in diffusers, of an attention's linears and norms for one kind of tokens (image or text)."""

    query: str
    key: str
    value: str
    query_norm: str  # an RMSNorm of each head, which only some attentions have
    key_norm: str


IMAGE = Stream("to_q", "to_k", "to_v", "norm_q", "norm_k")  # of a cross-attention, to_k and to_v read the text
TEXT = Stream("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")  # of a joint attention only


def assign_attention(
    name: str,
    heads: Heads,
    assignment: Mapping[str, LayerAssignment],
    weight_of: Callable[[str], Tensor],
    statistics: Mapping[str, LayerStatistics],
    recipe: Recipe,
    cross: bool,
    bias_of: Callable[[str], Tensor | None] = lambda name: None,
) -> LayerAssignment:
    """Return the assignment of the attention ``name``: ranges of its products, or the reason for high precision.

    ``assignment`` has its linears. ``cross``: keys come from the text. ``weight_of``, ``bias_of`` read by layer name.
    """
    row = LayerAssignment(name, "attention", (heads.width,), reason=reason_kept("attention", recipe.quant_level))
    fmt = recipe.enable.attention
    if row.reason is not None or fmt is None:
        return row
    if heads.width % HEAD_WIDTH_MULTIPLE:
        return replace(row, reason=f"its heads are {heads.width} wide, no multiple of {HEAD_WIDTH_MULTIPLE}")
    integers = FORMATS[fmt].equal_levels
    if integers and cross:
        return replace(row, reason="it reads the text, whose first token is far larger than the others")
    if integers and heads.rotary:
        return replace(row, reason="it rotates queries and keys by positions, which sampled inputs do not record")

    def output(layer: LayerAssignment, inputs: Tensor, norm: str | None) -> Tensor:
        """Apply a linear and, if named, the RMSNorm ``norm`` of each head, before RoPE: [heads, rows, head_width].

        Query and key are divided by the fourth root of the head's width, as in torch's scaled_dot_product_attention.
        """
        bias = bias_of(layer.name)
        found = F.linear(inputs, weight_of(layer.name).float(), None if bias is None else bias.float())
        if layer.output_scale is not None:
            found = found * layer.output_scale
        found = found.unflatten(1, (-1, heads.width))
        if norm and heads.normed:
            found = F.rms_norm(found, (heads.width,), weight_of(f"{name}.{norm}").float(), NORM_EPSILON)
        return found.transpose(0, 1) * (heads.width**-0.25 if norm else 1.0)

    sampled = []
    for stream in (stream for stream in (IMAGE, TEXT) if f"{name}.{stream.query}" in assignment):
        layers = [assignment[f"{name}.{linear}"] for linear in (stream.query, stream.key, stream.value)]
        rows = [statistics[layer.name].rows.values.float() for layer in layers]
        if not cross:  # the three linears read one tensor
            rows = [torch.cat(rows)] * 3
        norms = (stream.query_norm, stream.key_norm, None)
        sampled.append([output(*each) for each in zip(layers, rows, norms, strict=True)])
    query, key, value = (torch.cat(streams, dim=1) for streams in zip(*sampled, strict=True))
    if not integers:
        largest = pair_norms if heads.rotary else torch.abs
        ranges = tuple(FLOAT_HEADROOM * each.amax().view(1) for each in (largest(query), largest(key), value.abs()))
        return replace(row, activation_format=fmt, attention_amax=ranges)
    mean = key.mean(1)
    key = key - mean[:, None]
    ranges = tuple(
        INTEGER_HEADROOM * each.abs().amax((1, 2)) for each in (query, key, value, query @ key.transpose(1, 2))
    )
    return replace(row, activation_format=fmt, attention_amax=ranges, key_mean=mean.half().float())


def pair_norms(heads: Tensor) -> Tensor:
    """Compute the norms of pairs of neighbouring channels: [heads, rows, head_width] -> [..., head_width / 2]."""
    return heads.unflatten(-1, (-1, 2)).norm(dim=-1)


def float_scales(layer: LayerAssignment) -> list[float]:
    """Return the scales of query, key, value and softmax of an attention in a floating-point format.

    The range of a softmax is 1, without calibration. (ModelOpt gives it the scale 1, so that E4M3 rounds probabilities
    below 2^-10 to zero: half of all probabilities from about 1000 tokens on.)
    """
    ranges = (*layer.attention_amax, torch.ones(1))
    return [FORMATS[layer.activation_format].scales(torch.empty(0), amax)[0].item() for amax in ranges]


@dataclass(frozen=True)
class HeadFactors:
    """Factors for each head of an INT8 attention, fp32 [heads, 1, 1] with values of fp16, and quantization scales.

    Query times its factor has the range 1 and is quantized with ``unit_scale``; so are scaled scores and values.
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
    """Compute the factors and scales of an attention in an integer format, for simulation and export."""
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
