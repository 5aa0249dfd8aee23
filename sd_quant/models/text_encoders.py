"""The text encoders of all families as parts: CLIP and OpenCLIP, and T5's encoder.

| what          | inputs                                   | outputs                                            |
|---------------|------------------------------------------|----------------------------------------------------|
| ``clip_part`` | input_ids [B,77]                         | hidden_states [B,77,C], then a pooled vector [B,P] |
| ``t5_part``   | input_ids [B,T] (, attention_mask [B,T]) | last_hidden_state [B,T,C]                          |
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import Contract, Part


def positions(input_ids: Tensor) -> Tensor:
    """[1, 77]. Given explicitly, because CLIP's own is a buffer, which a graph without weights would have to carry."""
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


class ClipPart(nn.Module):
    """``outputs``: of transformers' output those that are wanted; hidden_states is that before the last layer."""

    def __init__(self, text_encoder: nn.Module, outputs: tuple[str, ...]):
        super().__init__()
        self.text_encoder, self.outputs = text_encoder, outputs

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self.text_encoder(input_ids, position_ids=positions(input_ids), output_hidden_states=True)
        found = {name: getattr(output, name, None) for name in self.outputs}
        return tuple(value[-2] if name == "hidden_states" else value for name, value in found.items())


class TextOutput(SimpleNamespace):
    """What diffusers' pipelines ask of a text encoder's answer: outputs by name, and by number the first."""

    def __getitem__(self, index: int) -> Tensor:
        return self.first[index]


def text_answer(outputs: Mapping[str, Tensor], first: tuple[str, ...]) -> TextOutput:
    found: dict[str, Any] = dict(outputs)
    if "hidden_states" in found:  # pipelines take the last but one
        found["hidden_states"] = (found["hidden_states"], None)
    return TextOutput(first=[outputs[name] for name in first], **found)


def clip_part(component: str, *outputs: str) -> Part:
    """``outputs`` as transformers names them; the last of them is also what is asked for by number."""
    contract = Contract({"input_ids": ("batch", CONTEXT_LENGTH)}, outputs, {"input_ids": torch.int32}, torch.float16)
    return Part(
        component,
        "text_encoder.",
        contract,
        lambda text_encoder: ClipPart(text_encoder, outputs),
        lambda found: text_answer(found, outputs[-1:]),
    )


class T5Part(nn.Module):
    def __init__(self, text_encoder: nn.Module):
        super().__init__()
        self.text_encoder = text_encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.text_encoder(input_ids, attention_mask=attention_mask).last_hidden_state


def t5_part(component: str, tokens: int, masked: bool = False) -> Part:
    """fp32, because T5's feed-forward overflows in fp16 (transformers keeps ``wo`` in fp32 for that reason)."""
    names = ("input_ids", "attention_mask") if masked else ("input_ids",)
    contract = Contract(
        dict.fromkeys(names, ("batch", tokens)),
        ("last_hidden_state",),
        dict.fromkeys(names, torch.int32),
        torch.float32,
    )
    return Part(component, "text_encoder.", contract, T5Part, lambda found: text_answer(found, ("last_hidden_state",)))
