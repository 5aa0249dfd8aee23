"""NeMo's key for each parameter of SDXL, and how the parameter is stored under it.

``locations`` maps the parameter names of a component to keys. The names alone decide: they tell how many ResBlocks a
level has, and which levels attend. NeMo's UNet keys are neither SGM's nor diffusers': its GroupNorm fuses the SiLU, so
indices in a ResBlock shift by one.
The road not taken is NeMo's own converter: it walks a fixed list that renames within the first block of each
transformer only, and so leaves 590 of 1680 UNet tensors random.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

PREFIX = {
    "unet": "model.model.diffusion_model.",
    "vae": "model.first_stage_model.",
    "text_encoder": "model.conditioner.embedders.0.transformer.text_model.",  # transformers' CLIPTextModel
    "text_encoder_2": "model.conditioner.embedders.1.model.",  # OpenCLIP's text tower
}
SIGMAS = "model.denoiser.sigmas"
LOGIT_SCALE = PREFIX["text_encoder_2"] + "logit_scale"
POSITION_IDS = PREFIX["text_encoder"] + "embeddings.position_ids"
UNUSED = {SIGMAS, LOGIT_SCALE, POSITION_IDS}  # part of the file, not of the four networks

Layout = Literal["same", "conv1x1", "transposed", "third 0", "third 1", "third 2"]
THIRDS: dict[str, Layout] = {"q": "third 0", "k": "third 1", "v": "third 2"}


@dataclass(frozen=True)
class Location:
    """The tensor of a NeMo state dict that holds a parameter of diffusers."""

    key: str
    layout: Layout = "same"  # a 1x1 convolution, transposed, or a third of the rows: OpenCLIP keeps q, k and v in one

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor that holds a parameter of ``shape``."""
        match self.layout:
            case "same":
                return tuple(shape)
            case "conv1x1":
                return (*shape, 1, 1)
            case "transposed":
                return tuple(reversed(shape))
            case _:
                return (3 * shape[0], *shape[1:])

    def parameter(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns the parameter that lies in the tensor ``stored``."""
        match self.layout:
            case "same":
                return stored
            case "conv1x1":
                return stored[:, :, 0, 0]
            case "transposed":
                return stored.t().contiguous()
            case _:
                return stored.chunk(3)[int(self.layout[-1])].clone()

    def tensor(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """Returns the tensor that holds the one parameter, or the three that are its thirds."""
        match self.layout:
            case "same":
                return parameters[0]
            case "conv1x1":
                return parameters[0][:, :, None, None]
            case "transposed":
                return parameters[0].t()
            case _:
                return torch.cat(parameters)


def locations(component: str, names: Iterable[str]) -> dict[str, Location]:
    """Returns the location of each parameter of a component, one of ``PREFIX``, by diffusers' name."""
    within = {"unet": _unet, "vae": _vae, "text_encoder": _clip, "text_encoder_2": _open_clip}[component](list(names))
    return {name: Location(PREFIX[component] + place.key, place.layout) for name, place in within.items()}


def count_indices(names: Iterable[str], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def _replace(name: str, rules: Mapping[str, str]) -> str:
    """Returns ``name`` with the first pattern of ``rules`` that starts it, up to a whole word, replaced."""
    for pattern, replacement in rules.items():
        renamed, count = re.subn(rf"^{pattern}(?=\.|$)", replacement, name)
        if count:
            return renamed
    return name


UNET_OUTER = {
    r"time_embedding\.linear_1": "time_embed.0",
    r"time_embedding\.linear_2": "time_embed.2",
    r"add_embedding\.linear_1": "label_emb.0.0",
    r"add_embedding\.linear_2": "label_emb.0.2",
    r"conv_in": "input_blocks.0.0",
    r"conv_norm_out": "out.0",
    r"conv_out": "out.1",
    r"mid_block\.resnets\.0": "middle_block.0",
    r"mid_block\.attentions\.0": "middle_block.1",
    r"mid_block\.resnets\.1": "middle_block.2",
}
UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.1",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.2",
    "conv_shortcut": "skip_connection",
}
UNET_TRANSFORMER_BLOCK = {
    "norm1": "attn1.norm",
    "norm2": "attn2.norm",
    "norm3": "ff.net.0",
    r"ff\.net\.0\.proj": "ff.net.1.proj",
    r"ff\.net\.2": "ff.net.3",
}


def _unet(names: list[str]) -> dict[str, Location]:
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
        outer = block(name) if name.startswith(("down_blocks.", "up_blocks.")) else _replace(name, UNET_OUTER)
        if ".resnets." in name:
            head, inner = re.fullmatch(r"((?:\w+put_blocks\.\d+|middle_block)\.\d+)\.(.*)", outer).groups()
            return f"{head}.{_replace(inner, UNET_RESNET)}"
        if ".transformer_blocks." in name:
            head, inner = re.fullmatch(r"(.*\.transformer_blocks\.\d+)\.(.*)", outer).groups()
            return f"{head}.{_replace(inner, UNET_TRANSFORMER_BLOCK)}"
        return outer

    return {name: Location(key(name)) for name in names}


def _vae(names: list[str]) -> dict[str, Location]:
    last_level = count_indices(names, "decoder.up_blocks.") - 1
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", r"to_out\.0": "proj_out"}

    def place(name: str) -> Location:
        half, _, rest = name.partition(".")
        if level := re.match(r"up_blocks\.(\d+)\.", rest):  # LDM counts the decoder's levels from the image up
            rest = f"up.{last_level - int(level[1])}.{rest[level.end() :]}"
        rest = rest.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        rest = re.sub(r"^down_blocks\.", "down.", rest)
        rest = re.sub(r"^((?:down|up)\.\d+)\.resnets\.", r"\1.block.", rest)
        rest = re.sub(r"^((?:down|up)\.\d+)\.(down|up)samplers\.0\.", r"\1.\2sample.", rest)
        rest = re.sub(r"^mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", rest)
        if rest.startswith("mid_block.attentions.0."):
            inner = _replace(rest.removeprefix("mid_block.attentions.0."), attention)
            linear = inner.endswith(".weight") and not inner.startswith("norm")
            return Location(f"{half}.mid.attn_1.{inner}", "conv1x1" if linear else "same")
        return Location(f"{half}.{rest}")

    return {name: place(name) for name in names}


def _clip(names: list[str]) -> dict[str, Location]:
    return {name: Location(name.removeprefix("text_model.")) for name in names}  # transformers 5 dropped that level


def _open_clip(names: list[str]) -> dict[str, Location]:
    whole = {
        "text_projection.weight": Location("text_projection", "transposed"),
        "text_model.embeddings.position_embedding.weight": Location("positional_embedding"),
    }
    outer = {
        r"text_model\.embeddings\.token_embedding": "token_embedding",
        r"text_model\.final_layer_norm": "ln_final",
        r"text_model\.encoder\.layers": "transformer.resblocks",
    }
    inner = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        r"mlp\.fc1": "mlp.c_fc",
        r"mlp\.fc2": "mlp.c_proj",
        r"self_attn\.out_proj": "attn.out_proj",
    }

    def place(name: str) -> Location:
        if name in whole:
            return whole[name]
        key = _replace(name, outer)
        if not key.startswith("transformer.resblocks."):
            return Location(key)
        head, rest = re.fullmatch(r"(transformer\.resblocks\.\d+)\.(.*)", key).groups()
        if joined := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            return Location(f"{head}.attn.in_proj_{joined[2]}", THIRDS[joined[1]])
        return Location(f"{head}.{_replace(rest, inner)}")

    return {name: place(name) for name in names}
