"""Stand-ins for the networks of CLIP score and FID."""

import string
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from sd_quant.config import Metrics

LONGEST = 16  # tokens of a prompt


def small_clip(folder: Path) -> Path:
    """Writes a CLIP of one layer a side with random weights; its text is read letter by letter."""
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokens = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    start, end = len(tokens) - 2, len(tokens) - 1
    tokenizer = CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    size = {"height": 32, "width": 32}
    CLIPProcessor(CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size), tokenizer).save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(tokens), "max_position_embeddings": LONGEST}
    special = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config=tower | text | special,
            vision_config=tower | {"image_size": 32, "patch_size": 16},
            projection_dim=8,
        )
    )
    model.save_pretrained(folder)
    return folder


class Means(nn.Module):
    """12 features of an image: the means of its quarters' channels."""

    num_features = 12

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(pixels.float(), 2).flatten(1)


def metrics_of(**knobs: str | bool) -> Metrics:
    """The section of knobs with these and no others."""
    return Metrics(**dict.fromkeys(each.name for each in fields(Metrics)) | knobs)
