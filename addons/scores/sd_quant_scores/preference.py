"""PickScore and HPSv2: predicted human preference for an image given its prompt, by CLIPs fine-tuned on human choices.

PickScore (Kirstain et al., Pick-a-Pic, NeurIPS 2023) is the logit scale times the cosine of image and prompt. HPSv2 and
HPSv2.1 (Wu et al., 2023) are the cosine, here times 100 as in their tables. Both have the network of OpenCLIP's
ViT-H/14. On one pair of similar images either score is a coin flip, as people are; only means over hundreds of prompts
are informative.

HPSv2's file has OpenCLIP's tensor names, which are mapped to transformers' CLIPModel: the package open_clip is not
needed. HPSv2's code resizes a tensor; torchvision antialiases that from 0.17 on, as is done here, and did not before.
"""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.archive import whole_file
from sd_quant.files.torch_weights import stored_tensors
from sd_quant.metrics.network_scores import Opened, Opener
from sd_quant.metrics.text_image import clip_config, cosines, open_clip_folder
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.empty import Read, with_weights, without_weights
from sd_quant_scores import HPS, PICKSCORE
from sd_quant_scores.authors import normalized, open_clip_locations, reader_of

SIZE = 224  # pixels of a side that the network sees
TOKENS = 77
VIT_H_14: dict[str, dict[str, Any]] = {  # in CLIPConfig's words
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "patch_size": 14, "image_size": SIZE, "hidden_act": "gelu",
    },
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "max_position_embeddings": TOKENS, "hidden_act": "gelu", "vocab_size": 49408, "eos_token_id": 49407,
    },
}  # fmt: skip
WIDTH = 1024  # of the features that are compared


def pick_score(weights: Path) -> Opener:
    """Return a loader of PickScore for images and prompts (truncated to 77 tokens, the last stays the end marker).

    ``weights``: a folder of PickScore_v1: transformers' CLIPModel, tokenizer and image processor. Raises SdQuantError
    for another folder.
    """
    vision = clip_config(weights, PICKSCORE).vision_config
    names = {"num_hidden_layers": "layers", "hidden_size": "width", "patch_size": "patch"}
    found, expected = (
        ", ".join(f"{title} {values[name]}" for name, title in names.items())
        for values in (vision.to_dict(), VIT_H_14["vision_config"])
    )
    if found != expected:
        raise ArtifactError(
            f"{weights} holds a CLIP whose vision network has {found}, expected PickScore's {expected}; name "
            f"{PICKSCORE.weights}"
        )

    def opened() -> Opened:
        model, pixels, tokens = open_clip_folder(weights)
        return Opened(
            model,
            lambda batch, texts: model.logit_scale.exp() * cosines(model, pixels(batch), tokens(texts)),
            {"weights": weights.name},
        )

    return opened


def hps(weights: Path) -> Opener:
    """Return a loader of HPSv2 or HPSv2.1, whichever the file ``weights`` holds; their values are not comparable.

    Prompts are truncated to 77 tokens, the last of which stays the end marker. Raises SdQuantError for another file.
    """
    model, read = empty_hps(weights)

    def opened() -> Opened:
        with_weights(model, read)
        tokenizer = clip_tokenizer()

        def score(batch: Sequence[np.ndarray], texts: Sequence[str]) -> Tensor:
            pixels = torch.stack([normalized(fitted(image)) for image in batch])
            tokens = tokenizer(
                [cleaned(text) for text in texts], truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
            )
            return 100 * cosines(model, pixels, tokens)

        return Opened(model, score, {"weights": weights.name})

    return opened


def empty_hps(weights: Path) -> tuple[Any, Read]:
    """Build HPSv2's network without weights, and a reader of its weights. Raises SdQuantError for another file."""
    from transformers import CLIPConfig, CLIPModel

    wanted = HPS.weights
    if not weights.is_file():
        raise ConfigError(f"{weights} is no file, expected HPSv2's weights; name {wanted}")
    with without_weights():
        model = CLIPModel(CLIPConfig(**VIT_H_14, projection_dim=WIDTH))
    places = open_clip_locations([name for name, _ in model.named_parameters()])
    tensors = stored_tensors(whole_file(weights), "state_dict")
    return model, reader_of(model, weights, tensors, places, wanted)


def fitted(image: np.ndarray) -> Tensor:
    """Resize the longer side of a uint8 image [H, W, 3] to SIZE and pad with black: [3, SIZE, SIZE] from 0 to 1.

    Antialiased bicubic on floats without clamping, as torchvision resizes a tensor, so values may exceed 0 to 1.
    """
    pixels = torch.tensor(image).permute(2, 0, 1).float() / 255
    scale = SIZE / max(image.shape[:2])
    sides = [round(side * scale) for side in image.shape[:2]]
    if scale != 1:
        pixels = F.interpolate(pixels[None], sides, mode="bicubic", antialias=True)[0]
    top, left = ((SIZE - side) // 2 for side in sides)
    return F.pad(pixels, (left, SIZE - sides[1] - left, top, SIZE - sides[0] - top))


def cleaned(prompt: str) -> str:
    """Clean a prompt as OpenCLIP's tokenizer does: ftfy, HTML entities unescaped twice, single spaces."""
    import ftfy

    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt)))).strip()
