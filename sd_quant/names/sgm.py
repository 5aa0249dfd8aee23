"""SDXL as one safetensors file in Stability AI's own layout, such as ``sd_xl_base_1.0.safetensors``.

NeMo's implementation descends from SGM's, so its keys are SGM's behind ``model.``, except in the UNet, where NeMo fuses
the SiLU into the GroupNorm and moves norms into the attention and the feed-forward: eight renames. Alternative not
taken: conversion by way of diffusers' layout, which splits tensors that NeMo's keys would join again.
"""

import re
from collections.abc import Collection, Iterable, Mapping

NETWORKS = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.transformer.text_model.",  # transformers' CLIPTextModel
    "text_encoder_2": "conditioner.embedders.1.model.",  # OpenCLIP's text tower
}
SIGMAS = "denoiser.sigmas"
UNET, PREFIXES = NETWORKS["unet"], (*NETWORKS.values(), SIGMAS)
TO_NEMO = {  # parts of the UNet's keys (with a dot put in front), at most one in each key
    ".in_layers.2.": ".in_layers.1.",
    ".out_layers.3.": ".out_layers.2.",
    ".out.2.": ".out.1.",
    ".norm1.": ".attn1.norm.",
    ".norm2.": ".attn2.norm.",
    ".norm3.": ".ff.net.0.",
    ".ff.net.0.proj.": ".ff.net.1.proj.",
    ".ff.net.2.": ".ff.net.3.",
}
FROM_NEMO = {nemo: sgm for sgm, nemo in TO_NEMO.items()}


def nemo_key(key: str) -> str:
    """Return NeMo's key for a key of SGM's SDXL. An unknown key stays as it is, and is later refused by name."""
    if not key.startswith(PREFIXES):
        return key
    within = key.removeprefix(UNET)
    return f"model.{key if within == key else UNET + replaced(within, TO_NEMO)}"


def sgm_key(key: str) -> str:
    """Return SGM's key for a key of NeMo's SDXL: the inverse of ``nemo_key``."""
    within = key.removeprefix(f"model.{UNET}")
    return key.removeprefix("model.") if within == key else UNET + replaced(within, FROM_NEMO)


def replaced(key: str, parts: Mapping[str, str]) -> str:
    dotted = f".{key}"
    found = next((part for part in parts if part in dotted), None)
    return key if found is None else dotted.replace(found, parts[found]).removeprefix(".")


def count_indices(names: Iterable[str], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """Return ``name`` with its first dotted parts replaced by the first match in ``beginnings`` (old to new)."""
    found = next((old for old in beginnings if f"{name}.".startswith(f"{old}.")), None)
    return name if found is None else beginnings[found] + name.removeprefix(found)


UNET_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def sgm_names(names: Collection[str]) -> dict[str, str]:
    """Return SGM's key, without the prefix ``UNET``, of each parameter of SDXL's UNet by diffusers' name.

    Both store the same tensors: none is joined, split or reshaped. ``names`` are those of all parameters, because SGM
    numbers the blocks of all levels consecutively, so that a key depends on how many blocks there are.
    """
    resnets_down = count_indices(names, "down_blocks.0.resnets.")
    blocks_per_level = resnets_down + 1  # down: the ResBlocks and a downsampler; up: one ResBlock more
    attending_up = {name.split(".")[1] for name in names if re.match(r"up_blocks\.\d+\.attentions\.", name)}

    def block(name: str) -> str:
        side, level, kind, index, inner = re.fullmatch(r"(\w+)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)", name).groups()
        first = int(level) * blocks_per_level
        if kind == "downsamplers":
            return f"input_blocks.{first + blocks_per_level}.0.{inner.replace('conv', 'op')}"
        if kind == "upsamplers":
            return f"output_blocks.{first + resnets_down}.{2 if level in attending_up else 1}.{inner}"
        position = 0 if kind == "resnets" else 1
        if side == "down":
            return f"input_blocks.{first + 1 + int(index)}.{position}.{inner}"  # input_blocks.0 is conv_in
        return f"output_blocks.{first + int(index)}.{position}.{inner}"

    def key(name: str) -> str:
        outer = block(name) if name.startswith(("down_blocks.", "up_blocks.")) else renamed(name, UNET_OUTER)
        if ".resnets." in name:
            head, inner = re.fullmatch(r"((?:\w+put_blocks\.\d+|middle_block)\.\d+)\.(.*)", outer).groups()
            return f"{head}.{renamed(inner, UNET_RESNET)}"
        return outer

    return {name: key(name) for name in names}
