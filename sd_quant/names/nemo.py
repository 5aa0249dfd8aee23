"""NeMo's key for each parameter of SDXL, and how the parameter is stored under it.

The names of a component's parameters alone decide: they tell how many ResBlocks a level has, and which levels attend.
NeMo's UNet keys are neither SGM's nor diffusers': its GroupNorm fuses the SiLU, so indices in a ResBlock shift by one.
The road not taken is NeMo's own converter: it walks a fixed list that renames within the first block of each
transformer only, and so leaves 590 of 1680 UNet tensors random.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor of the state dict holds a parameter, or several parameters below each other."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]  # shape of the parameter -> shape of the tensor
    parameter: Callable[[torch.Tensor], torch.Tensor]  # the tensor -> the parameter
    tensor: Callable[[list[torch.Tensor]], torch.Tensor]  # all parameters in it -> the tensor
    turn: int = 0  # place of the parameter among those in the tensor


def _third(turn: int, stored: torch.Tensor) -> torch.Tensor:
    return stored.chunk(3)[turn].clone()


SAME = Layout(tuple, lambda stored: stored, lambda parameters: parameters[0])
CONV1X1 = Layout(
    lambda shape: (*shape, 1, 1), lambda stored: stored[:, :, 0, 0], lambda parameters: parameters[0][:, :, None, None]
)
TRANSPOSED = Layout(
    lambda shape: tuple(reversed(shape)), lambda stored: stored.t().contiguous(), lambda parameters: parameters[0].t()
)
THIRDS = {  # OpenCLIP keeps query, key and value in one tensor
    letter: Layout(lambda shape: (3 * shape[0], *shape[1:]), partial(_third, turn), torch.cat, turn)
    for turn, letter in enumerate("qkv")
}


@dataclass(frozen=True)
class Location:
    """The tensor of a NeMo state dict that holds a parameter of diffusers."""

    key: str
    layout: Layout = SAME


def locations(component: str, names: Iterable[str]) -> dict[str, Location]:
    """Returns the location of each parameter of a component, one of ``PREFIX``, by diffusers' name."""
    within = {"unet": _unet, "vae": _vae, "text_encoder": _clip, "text_encoder_2": _open_clip}[component](list(names))
    return {name: Location(PREFIX[component] + place.key, place.layout) for name, place in within.items()}


def count_indices(names: Iterable[str], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    """Returns ``name`` with the first of ``beginnings`` that it begins with, up to a whole word, replaced."""
    found = next((old for old in beginnings if f"{name}.".startswith(f"{old}.")), None)
    return name if found is None else beginnings[found] + name.removeprefix(found)


UNET_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.1",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
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
    "ff.net.0.proj": "ff.net.1.proj",
    "ff.net.2": "ff.net.3",
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
        outer = block(name) if name.startswith(("down_blocks.", "up_blocks.")) else _replaced(name, UNET_OUTER)
        if ".resnets." in name:
            head, inner = re.fullmatch(r"((?:\w+put_blocks\.\d+|middle_block)\.\d+)\.(.*)", outer).groups()
            return f"{head}.{_replaced(inner, UNET_RESNET)}"
        if ".transformer_blocks." in name:
            head, inner = re.fullmatch(r"(.*\.transformer_blocks\.\d+)\.(.*)", outer).groups()
            return f"{head}.{_replaced(inner, UNET_TRANSFORMER_BLOCK)}"
        return outer

    return {name: Location(key(name)) for name in names}


def _vae(names: list[str]) -> dict[str, Location]:
    last_level = count_indices(names, "decoder.up_blocks.") - 1
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}

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
            inner = _replaced(rest.removeprefix("mid_block.attentions.0."), attention)
            linear = inner.endswith(".weight") and not inner.startswith("norm")
            return Location(f"{half}.mid.attn_1.{inner}", CONV1X1 if linear else SAME)
        return Location(f"{half}.{rest}")

    return {name: place(name) for name in names}


def _clip(names: list[str]) -> dict[str, Location]:
    return {name: Location(name.removeprefix("text_model.")) for name in names}  # transformers 5 dropped that level


def _open_clip(names: list[str]) -> dict[str, Location]:
    whole = {
        "text_projection.weight": Location("text_projection", TRANSPOSED),
        "text_model.embeddings.position_embedding.weight": Location("positional_embedding"),
    }
    outer = {
        "text_model.embeddings.token_embedding": "token_embedding",
        "text_model.final_layer_norm": "ln_final",
        "text_model.encoder.layers": "transformer.resblocks",
    }
    inner = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn.out_proj": "attn.out_proj",
    }

    def place(name: str) -> Location:
        if name in whole:
            return whole[name]
        key = _replaced(name, outer)
        if not key.startswith("transformer.resblocks."):
            return Location(key)
        head, rest = re.fullmatch(r"(transformer\.resblocks\.\d+)\.(.*)", key).groups()
        if joined := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            return Location(f"{head}.attn.in_proj_{joined[2]}", THIRDS[joined[1]])
        return Location(f"{head}.{_replaced(rest, inner)}")

    return {name: place(name) for name in names}
