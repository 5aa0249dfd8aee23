"""A network as its assignment rewrites it before weights are rounded: smoothed weights, quantized attention products.

Both ``modelopt`` (quantizers) and ``native`` (layers that multiply codes) build on it and round the weights.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.attention import EXPONENTIAL_LEVELS, IMAGE, TEXT, Stream, float_scales, head_factors
from sd_quant.quantization.formats import FORMATS, Format


@torch.no_grad()
def rewrite(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> None:
    """Smooth weights and norms of ``module`` in place, without rounding, and quantize its attentions' products."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        if layer.role != "attention":
            for parameter in target.parameters(recurse=False):
                if not parameter.is_meta:
                    parameter.copy_(rewritten(parameter, layer))
        elif layer.activation_format is not None:
            joint = isinstance(target.processor, JointAttnProcessor2_0)
            target.set_processor((QuantizedJointAttention if joint else QuantizedAttention)(layer))


class QuantizedAttention(nn.Module):
    """An attention processor of diffusers with quantized inputs of its two matrix products."""

    def __init__(self, layer: LayerAssignment):
        super().__init__()
        kind = IntegerProducts if FORMATS[layer.activation_format].equal_levels else FloatProducts
        self.products = kind(layer)

    def forward(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_):
        heads = heads_of(attention, IMAGE, hidden_states, encoder_hidden_states)
        return attention.to_out[1](attention.to_out[0](self.mixed(*heads)))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output [B, tokens, heads * head_width] for inputs [B, heads, tokens, head_width]."""
        root = query.shape[-1] ** -0.25
        return self.products(query * root, key * root, value).transpose(1, 2).flatten(2)


class QuantizedJointAttention(QuantizedAttention):
    """The computation of diffusers' JointAttnProcessor2_0: tokens of image, then of text, attend to each other.

    Without text it is a self-attention. The last block does not use the text's output, which has no projection there.
    """

    def forward(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_):
        if encoder_hidden_states is None:
            return super().forward(attention, hidden_states)
        streams = heads_of(attention, IMAGE, hidden_states), heads_of(attention, TEXT, encoder_hidden_states)
        mixed = self.mixed(*(torch.cat(both, dim=2) for both in zip(*streams, strict=True)))
        image, text = mixed.tensor_split([hidden_states.shape[1]], dim=1)
        image = attention.to_out[1](attention.to_out[0](image))
        return image, text if attention.context_pre_only else attention.to_add_out(text)


def heads_of(attention, stream: Stream, tokens: Tensor, context: Tensor | None = None) -> list[Tensor]:
    """Query, key and value [B, heads, tokens, head_width] of one stream, from diffusers' Attention.

    Key and value are those of ``context``, by default of ``tokens``.
    """
    found, context = [], tokens if context is None else context
    for linear, norm, read in (
        (stream.query, stream.query_norm, tokens),
        (stream.key, stream.key_norm, context),
        (stream.value, None, context),
    ):
        heads = attention.head_to_batch_dim(getattr(attention, linear)(read), out_dim=4)
        normed = None if norm is None else getattr(attention, norm)
        found.append(heads if normed is None else normed(heads))
    return found


def fake_quantized(fmt: Format, x: Tensor, number: float) -> Tensor:
    """``x`` quantized and dequantized. The scale is a Python float, so that no call waits for a GPU to read it."""
    scale = torch.full((), number, device=x.device)
    return fmt.dequantize(fmt.quantize(x, scale), scale).to(x)


class FloatProducts(nn.Module):
    """QK^T and softmax times V in a floating-point format, for query, key and value [B, heads, tokens, head_width]."""

    def __init__(self, layer: LayerAssignment):
        super().__init__()
        self.fmt, self.scales = FORMATS[layer.activation_format], float_scales(layer)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rounded = partial(fake_quantized, self.fmt)
        query_scale, key_scale, value_scale, softmax_scale = self.scales
        scores = rounded(query, query_scale) @ rounded(key, key_scale).transpose(2, 3)
        return rounded(scores.softmax(-1), softmax_scale) @ rounded(value, value_scale)


class IntegerProducts(nn.Module):
    """The same two products in integers, see ``quantization.attention``."""

    def __init__(self, layer: LayerAssignment):
        super().__init__()
        self.fmt, self.scales = FORMATS[layer.activation_format], head_factors(layer)
        self.register_buffer("key_mean", layer.key_mean[:, None], persistent=False)
        for name in ("query", "key", "logit", "value", "output"):
            self.register_buffer(name, getattr(self.scales, name), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rounded, unit = partial(fake_quantized, self.fmt), self.scales.unit_scale
        query = rounded(query * self.query, unit)
        key = rounded((key - self.key_mean) * self.key, self.scales.key_scale)
        scores = rounded(query @ key.transpose(2, 3), unit)
        logits = (scores - scores.amax(-1, keepdim=True)) * self.logit
        codes = (logits.exp() / self.scales.exponential_scale).round().clamp(max=EXPONENTIAL_LEVELS)
        mixed = codes @ rounded(value * self.value, unit) / codes.sum(-1, keepdim=True)
        return mixed * self.output
