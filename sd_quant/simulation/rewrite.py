"""Apply the parts of layer assignments that come before rounding: smoothed weights, quantized attention products.

``modelopt`` (fake quantization) and ``native`` (quantized layers) then round the weights of the rewritten network.
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
    """Rewrite weights, biases and norms of ``module`` in place, without rounding, and quantize attention's products."""
    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        if layer.role != "attention":
            for parameter in target.parameters(recurse=False):
                if not parameter.is_meta:
                    parameter.copy_(rewritten(parameter, layer))
        elif layer.activation_format is not None:
            kind = PROCESSORS.get(type(target.processor).__name__, QuantizedAttention)
            target.set_processor(kind(layer))


class QuantizedAttention(nn.Module):
    """A diffusers attention processor that fake-quantizes the inputs of attention's two matrix products."""

    def __init__(self, layer: LayerAssignment):
        super().__init__()
        kind = IntegerProducts if FORMATS[layer.activation_format].equal_levels else FloatProducts
        self.products = kind(layer)

    def forward(
        self,
        attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_,
    ):
        heads = heads_of(attention, IMAGE, hidden_states, encoder_hidden_states)
        if attention_mask is not None:
            batch, keys = len(heads[1]), heads[1].shape[2]
            mask = attention.prepare_attention_mask(attention_mask, keys, batch)
            heads.append(mask.view(batch, attention.heads, -1, mask.shape[-1]))
        return attention.to_out[1](attention.to_out[0](self.mixed(*heads)))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention's output [B, tokens, heads * head_width] from inputs [B, heads, tokens, head_width].

        In an integer format no ``mask`` is supported: only attentions without a mask are quantized to integers.
        """
        root = query.shape[-1] ** -0.25
        return self.products(query * root, key * root, value, *mask).transpose(1, 2).flatten(2)


class QuantizedJointAttention(QuantizedAttention):
    """Quantized version of diffusers' JointAttnProcessor2_0: image tokens, then text tokens, attend to each other.

    Without text it is a self-attention. In the last block the text's output is not projected.
    """

    def forward(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_, **__):
        if encoder_hidden_states is None:
            return super().forward(attention, hidden_states)
        streams = heads_of(attention, IMAGE, hidden_states), heads_of(attention, TEXT, encoder_hidden_states)
        mixed = self.mixed(*(torch.cat(both, dim=2) for both in zip(*streams, strict=True)))
        image, text = mixed.tensor_split([hidden_states.shape[1]], dim=1)
        image = attention.to_out[1](attention.to_out[0](image))
        return image, text if attention.context_pre_only else attention.to_add_out(text)


class QuantizedFluxAttention(QuantizedAttention):
    """Quantized version of diffusers' FluxAttnProcessor: text tokens, then image tokens, with RoPE on query and key.

    Without text it is the attention of a single-stream block, without an output projection.
    """

    def forward(
        self,
        attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **_,
    ):
        from diffusers.models.embeddings import apply_rotary_emb

        streams = [heads_of(attention, IMAGE, hidden_states)]
        if encoder_hidden_states is not None:
            streams.insert(0, heads_of(attention, TEXT, encoder_hidden_states))
        query, key, value = (torch.cat(each, dim=2) for each in zip(*streams, strict=True))
        if image_rotary_emb is not None:
            query, key = (apply_rotary_emb(each, image_rotary_emb) for each in (query, key))
        mixed = self.mixed(query, key, value, *(() if attention_mask is None else (attention_mask,)))
        if encoder_hidden_states is None:
            return mixed
        text, image = mixed.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attention.to_out[1](attention.to_out[0](image)), attention.to_add_out(text)


PROCESSORS = {  # by the name of diffusers' own, which they replace; QuantizedAttention replaces all others
    "JointAttnProcessor2_0": QuantizedJointAttention,
    "FluxAttnProcessor": QuantizedFluxAttention,
}


def heads_of(attention, stream: Stream, tokens: Tensor, context: Tensor | None = None) -> list[Tensor]:
    """Compute query, key and value [B, heads, tokens, head_width] of one stream with diffusers' ``attention``.

    Key and value are computed from ``context``, by default from ``tokens``.
    """
    found, context = [], tokens if context is None else context
    for linear, norm, read in (
        (stream.query, stream.query_norm, tokens),
        (stream.key, stream.key_norm, context),
        (stream.value, None, context),
    ):
        heads = getattr(attention, linear)(read).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        normed = None if norm is None else getattr(attention, norm)
        found.append(heads if normed is None else normed(heads))
    return found


def fake_quantized(fmt: Format, x: Tensor, number: float) -> Tensor:
    """Fake-quantize ``x`` with the scale ``number``, a Python float, so that no call waits for a GPU to read it."""
    scale = torch.full((), number, device=x.device)
    return fmt.dequantize(fmt.quantize(x, scale), scale).to(x)


class FloatProducts(nn.Module):
    """Attention with both matrix products in fake-quantized FP8, for q, k and v [B, heads, tokens, head_width].

    ``mask`` [B, heads, 1 or tokens, keys] is added to the scores; the scores are not rounded.
    """

    def __init__(self, layer: LayerAssignment):
        super().__init__()
        self.fmt, self.scales = FORMATS[layer.activation_format], float_scales(layer)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | float = 0.0) -> Tensor:
        rounded = partial(fake_quantized, self.fmt)
        query_scale, key_scale, value_scale, softmax_scale = self.scales
        scores = rounded(query, query_scale) @ rounded(key, key_scale).transpose(2, 3)
        return rounded((scores + mask).softmax(-1), softmax_scale) @ rounded(value, value_scale)


class IntegerProducts(nn.Module):
    """Attention with both matrix products in fake-quantized integers, as ``quantization.attention`` describes."""

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
