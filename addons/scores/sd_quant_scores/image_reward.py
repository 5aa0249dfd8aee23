"""ImageReward (Xu et al., NeurIPS 2023): BLIP encodes the prompt with cross-attention to the image; a head scores it.

A ViT-L/16 at 224 pixels, a BERT whose layers attend to the ViT's 197 features, and on the first token five linear
layers without activations. The score is scaled to mean 0 and deviation 1 over ImageReward's own images. BLIP's networks
are transformers' classes. The authors' ``med_config.json`` is not needed: the weights determine its values.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files import read_regular, refusing
from sd_quant.files.archive import whole_file
from sd_quant.files.torch_weights import stored_tensors
from sd_quant.metrics.network_scores import Opened, Opener, check_folder
from sd_quant.models.empty import Read, with_weights, without_weights
from sd_quant.names.nemo import Location
from sd_quant_scores import IMAGE_REWARD
from sd_quant_scores.authors import blip_vision_name, normalized, reader_of

WEIGHTS, VOCABULARY = "ImageReward.pt", "vocab.txt"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's number over the authors' images
SIZE = 224
TOKENS = 35
ADDED = 2  # tokens of BLIP behind BERT's vocabulary
VISION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": SIZE, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 512, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
HEAD = {0: 1024, 2: 128, 4: 64, 6: 16, 7: 1}  # outputs of each linear, by its place among the authors' layers
UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")


class ImageReward(nn.Module):
    """ImageReward's network: pixels fp32 [N, 3, 224, 224] and tokens [N, 35] with their mask give rewards [N]."""

    def __init__(self):
        super().__init__()
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        self.vision = BlipVisionModel(BlipVisionConfig(**VISION))
        text = BlipTextConfig(**TEXT, encoder_hidden_size=VISION["hidden_size"])
        self.text = BlipTextModel(text, add_pooling_layer=False)
        widths = [TEXT["hidden_size"], *HEAD.values()]
        self.head = nn.Sequential(*(nn.Linear(*pair) for pair in zip(widths[:-1], widths[1:], strict=True)))

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        seen = self.vision(pixels).last_hidden_state
        read = self.text(tokens, attention_mask=mask, encoder_hidden_states=seen).last_hidden_state
        return (self.head(read[:, 0])[:, 0] - MEAN) / STD


def image_reward(weights: Path) -> Opener:
    """Return a loader of ImageReward for images and prompts (truncated to 35 tokens, the last stays the separator).

    ``weights``: a folder with ``ImageReward.pt`` and BERT's ``vocab.txt``. Raises SdQuantError for another folder.
    """
    check_folder(weights, IMAGE_REWARD, (WEIGHTS,), (VOCABULARY,))
    network, read = empty_image_reward(weights / WEIGHTS)
    tokenizer = bert_tokenizer(weights / VOCABULARY)

    def opened() -> Opened:
        with_weights(network, read)

        def score(batch: Sequence[np.ndarray], texts: Sequence[str]) -> Tensor:
            device = next(network.parameters()).device
            tokens = tokenizer(
                list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
            ).to(device)
            pixels = torch.stack([normalized(cropped(image)) for image in batch])
            return network(pixels.to(device), tokens["input_ids"], tokens["attention_mask"])

        return Opened(network, score, {"weights": WEIGHTS})

    return opened


def empty_image_reward(path: Path) -> tuple[ImageReward, Read]:
    """Build the network without weights and a reader of its weights. Raises ArtifactError for a mismatching file."""
    with without_weights():
        network = ImageReward()
    tensors = stored_tensors(whole_file(path))
    places = {name: Location(authors_name(name)) for name, _ in network.named_parameters()}
    unused = [name for name in tensors if name.startswith(UNUSED)]
    return network, reader_of(network, path, tensors, places, IMAGE_REWARD.weights, unused)


def authors_name(name: str) -> str:
    """Return the tensor name in ``ImageReward.pt`` of the parameter ``name`` of ``ImageReward``."""
    part, rest = name.split(".", 1)
    if part == "vision":
        return f"blip.visual_encoder.{blip_vision_name(rest)}"
    if part == "text":
        return f"blip.text_encoder.{rest}"
    number, kind = rest.split(".")
    return f"mlp.layers.{[*HEAD][int(number)]}.{kind}"


def bert_tokenizer(path: Path):
    """Build BERT's uncased tokenizer from a file with one token a line. Raises ArtifactError for another vocabulary."""
    from transformers import BertTokenizer

    with refusing(f"{path} cannot be read as BERT's vocabulary", OSError, UnicodeDecodeError):
        words = read_regular(path).decode("utf-8").splitlines()
    expected = TEXT["vocab_size"] - ADDED
    if len(words) != expected:
        raise ArtifactError(
            f"{path} has {len(words)} tokens, expected the {expected} of bert-base-uncased; name {IMAGE_REWARD.weights}"
        )
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def cropped(image: np.ndarray) -> Tensor:
    """Resize the shorter side of a uint8 image [H, W, 3] to SIZE and crop the center: fp32 [3, SIZE, SIZE], 0 to 1.

    Resized by Pillow, bicubic in 8 bits; sizes and offsets are rounded as in torchvision.
    """
    height, width = image.shape[:2]
    short = min(height, width)
    sides = [SIZE if side == short else int(SIZE * side / short) for side in (width, height)]
    left, top = (int(round((side - SIZE) / 2)) for side in sides)
    resized = Image.fromarray(image).resize(sides, Image.Resampling.BICUBIC)
    taken = resized.crop((left, top, left + SIZE, top + SIZE))
    return torch.tensor(np.asarray(taken)).permute(2, 0, 1).float() / 255
