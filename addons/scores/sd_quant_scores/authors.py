"""Tensor names in the original weight files of CLIP and BLIP, mapped to transformers', and CLIP's normalization.

OpenCLIP's text tower has the tensor names of NeMo's SDXL checkpoints, and its vision tower has the same blocks under
``visual.``. BLIP's text network has transformers' names already.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.files.checks import check_tensors
from sd_quant.files.tensors import Readable
from sd_quant.models.empty import Read
from sd_quant.names.nemo import PREFIX, TRANSPOSED, Location, locations

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the colours that CLIP and those who started from it were shown
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
VISUAL = {  # of OpenCLIP, what is not a block
    "visual_projection.weight": Location("visual.proj", TRANSPOSED),
    "vision_model.embeddings.class_embedding": Location("visual.class_embedding"),
    "vision_model.embeddings.patch_embedding.weight": Location("visual.conv1.weight"),
    "vision_model.embeddings.position_embedding.weight": Location("visual.positional_embedding"),
    **{
        f"vision_model.{norm}.{kind}": Location(f"visual.{theirs}.{kind}")
        for norm, theirs in (("pre_layrnorm", "ln_pre"), ("post_layernorm", "ln_post"))
        for kind in ("weight", "bias")
    },
}
BLOCKS = "vision_model.encoder."
BLIP = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding": "patch_embed.proj",
    "encoder.layers": "blocks",
    "post_layernorm": "norm",
}
BLIP_BLOCK = {
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def open_clip_locations(names: Iterable[str]) -> dict[str, Location]:
    """Return the location in an OpenCLIP file of each parameter of a ``CLIPModel``, by the parameter's name."""
    as_text = {name: name.replace(BLOCKS, "text_model.encoder.") for name in names if name not in VISUAL}
    places = locations("text_encoder_2", as_text.values())
    found = {}
    for name, text_name in as_text.items():
        key = places[text_name].key.removeprefix(PREFIX["text_encoder_2"])
        found[name] = Location(f"visual.{key}" if name.startswith(BLOCKS) else key, places[text_name].layout)
    return found | {name: VISUAL[name] for name in names if name in VISUAL}


def blip_vision_name(name: str) -> str:
    """Return the name in BLIP's original file of a ``BlipVisionModel`` parameter, without ``visual_encoder.``."""
    outer = next(part for part in BLIP if name.startswith(part))
    block = re.fullmatch(r"(\.\d+)\.(.+)\.(weight|bias)", name.removeprefix(outer))
    rest = f"{block[1]}.{BLIP_BLOCK[block[2]]}.{block[3]}" if block else name.removeprefix(outer)
    return BLIP[outer] + rest


def reader_of(
    network: nn.Module,
    path: Path,
    tensors: Mapping[str, Readable],
    places: Mapping[str, Location],
    wanted: str,
    unused: Collection[str] = (),
) -> Read:
    """Return a reader of ``network``'s parameters, located by ``places``. Raises ArtifactError for a wrong shape."""
    shapes = {
        places[name].key: places[name].layout.shape(tuple(each.shape)) for name, each in network.named_parameters()
    }
    check_tensors(path, tensors, shapes, unused, f"of {type(network).__name__}", f"name {wanted}")
    return lambda name: places[name].layout.parameter(tensors[places[name].key].read())


def normalized(pixels: Tensor) -> Tensor:
    """Normalize pixels [3, H, W] from 0 to 1 by the channel means and deviations of CLIP's training images."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (CLIP_MEAN, CLIP_STD))
    return (pixels - mean) / std
