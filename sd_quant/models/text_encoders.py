"""Text encoders as parts: CLIP, OpenCLIP, T5. B: batch; C: width; P: width of pooled text; T: most tokens for T5.

| part          | inputs                                        | outputs                                              |
|---------------|-----------------------------------------------|------------------------------------------------------|
| ``clip_part`` | input_ids [B,77]                              | some of hidden_states, last_hidden_state (both       |
|               |                                               | [B,77,C]), pooler_output, text_embeds (both [B,P])   |
| ``t5_part``   | input_ids [B,T], with ``masked`` also         | last_hidden_state [B,T,C]                            |
|               | attention_mask [B,T]                          |                                                      |
"""

from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import Contract, Part, SharedInput
from sd_quant.models.roles import Row, inputs_by_place, inputs_of_transformer

# Inputs of CLIP's blocks, then of T5's. The producer is a norm with a gain, or the linear of the values, because an
# attention's output is a weighted mean of values.
INPUTS: tuple[Row, ...] = (
    ("self_attn.", ("q_proj", "k_proj", "v_proj"), "layer_norm1", False),
    ("self_attn.", ("out_proj",), "self_attn.v_proj", False),
    ("mlp.", ("fc1",), "layer_norm2", False),
    ("layer.0.SelfAttention.", ("q", "k", "v"), "layer.0.layer_norm", False),
    ("layer.0.SelfAttention.", ("o",), "layer.0.SelfAttention.v", False),
    ("layer.1.DenseReluDense.", ("wi", "wi_0", "wi_1"), "layer.1.layer_norm", False),
)


def inputs_of_part(network: nn.Module, layers: Iterable[str]) -> list[SharedInput]:
    """Return which linears among ``layers`` read the same tensor, in a text encoder, autoencoder or other network.

    ``SharedInput.producer`` is known for CLIP, T5 and the autoencoder's attention.
    """
    modules = dict(network.named_modules())
    linears = [name for name in layers if isinstance(modules[name], nn.Linear)]
    inputs = inputs_by_place(linears, INPUTS)
    for place, shared in enumerate(inputs):
        made = modules.get(shared.producer)
        if made is None or len(made.weight) != modules[shared.readers[0]].in_features:  # not as wide as the tensor
            inputs[place] = SharedInput(shared.readers)
    seen = {name for shared in inputs for name in shared.readers}
    return [*inputs, *inputs_of_transformer([name for name in linears if name not in seen])]


def padded(hidden: Tensor, tokens: int) -> Tensor:
    """Pad ``hidden`` [B, 77, C] with zeros to [B, tokens, C], as NeMo does (encoders/modules.py)."""
    return F.pad(hidden, (0, 0, 0, tokens - hidden.shape[1])) if tokens > hidden.shape[1] else hidden


class ClipPart(nn.Module):
    """A CLIP text encoder with outputs named as in transformers.

    hidden_states is the output of the last layer but one, padded with zeros to ``tokens``.
    """

    def __init__(self, text_encoder: nn.Module, outputs: tuple[str, ...], tokens: int = 0):
        super().__init__()
        self.text_encoder, self.outputs, self.tokens = text_encoder, outputs, tokens
        last = f"encoder.layers.{text_encoder.config.num_hidden_layers - 1}"
        self.unread = (last,) if outputs == ("hidden_states",) else ()  # layers that the graph lacks

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # CLIP's buffer would be a constant
        output = self.text_encoder(input_ids, position_ids=places, output_hidden_states=True)
        values = {name: getattr(output, name, None) for name in self.outputs}
        return tuple(
            padded(value[-2], self.tokens) if name == "hidden_states" else value for name, value in values.items()
        )


class TextOutput(SimpleNamespace):
    """A text encoder's outputs for diffusers' pipelines: all as attributes, the outputs in ``first`` by index too."""

    def __getitem__(self, index: int) -> Tensor:
        return self.first[index]


def text_answer(outputs: Mapping[str, Tensor], first: tuple[str, ...]) -> TextOutput:
    """Convert ``outputs`` for diffusers' pipelines, which read the outputs named in ``first`` by index."""
    attributes: dict[str, Any] = dict(outputs)
    if "hidden_states" in attributes:  # pipelines take the last but one of all layers' states
        attributes["hidden_states"] = (attributes["hidden_states"], None)
    return TextOutput(first=[outputs[name] for name in first], **attributes)


def clip_part(component: str, *outputs: str, names: tuple[str, ...] = (), tokens: int = 0) -> Part:
    """Return a CLIP text encoder as a part. ``outputs``: transformers' names; pipelines read the last by index.

    ``names`` are the graph's names of these outputs, by default the same. Hidden states are padded to ``tokens``.
    """
    names, ids = names or outputs, "input_ids"
    contract = Contract({ids: ("batch", CONTEXT_LENGTH)}, names, {ids: torch.int32}, torch.float16)

    def answer(values: Mapping[str, Tensor]) -> TextOutput:
        named = {output: values[name] for output, name in zip(outputs, names, strict=True)}
        return text_answer({**values, **named}, outputs[-1:])

    clip = partial(ClipPart, outputs=outputs, tokens=tokens)
    return Part(component, "text_encoder.", contract, clip, answer, excluded=("text_projection",))


class T5Part(nn.Module):
    def __init__(self, text_encoder: nn.Module):
        super().__init__()
        self.text_encoder = text_encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.text_encoder(input_ids, attention_mask=attention_mask).last_hidden_state


def t5_part(component: str, tokens: int, masked: bool = False) -> Part:
    """Return T5's encoder as a part that reads ``tokens`` tokens; ``masked`` adds the attention mask to its inputs.

    The part is in fp32: T5's feed-forward overflows in fp16 (transformers keeps ``wo`` in fp32 for the same reason).
    """
    inputs, outputs = ("input_ids", "attention_mask") if masked else ("input_ids",), ("last_hidden_state",)
    contract = Contract(
        dict.fromkeys(inputs, ("batch", tokens)), outputs, dict.fromkeys(inputs, torch.int32), torch.float32
    )
    answer = partial(text_answer, first=outputs)
    return Part(component, "text_encoder.", contract, T5Part, answer, excluded=("wo",))
