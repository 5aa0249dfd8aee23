"""BLIP's name for each parameter of transformers' ``BlipVisionModel``; its text network has the same names in both."""

import re

OUTER = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding": "patch_embed.proj",
    "encoder.layers": "blocks",
    "post_layernorm": "norm",
}
INNER = {
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def blip_vision_name(name: str) -> str:
    """Returns BLIP's name of a parameter, without ``visual_encoder.``."""
    outer = next(part for part in OUTER if name.startswith(part))
    block = re.fullmatch(r"(\.\d+)\.(.+)\.(weight|bias)", name.removeprefix(outer))
    rest = f"{block[1]}.{INNER[block[2]]}.{block[3]}" if block else name.removeprefix(outer)
    return OUTER[outer] + rest
