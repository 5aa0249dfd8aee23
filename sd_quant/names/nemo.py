"""NeMo's key for each parameter of SDXL, and how the parameter is stored under it.

It follows from the names of a component's parameters alone. The UNet's keys are SGM's with eight renames (``sgm``).
Alternative not taken: NeMo's own converter. It walks a fixed list that renames within the first block of each
transformer only, and so leaves 590 of 1680 UNet tensors random.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sd_quant.names.sgm import NETWORKS, TO_NEMO, count_indices, renamed, replaced, sgm_names
from sd_quant.names.sgm import SIGMAS as SGM_SIGMAS

PREFIX = {name: f"model.{prefix}" for name, prefix in NETWORKS.items()}
SIGMAS = f"model.{SGM_SIGMAS}"
LOGIT_SCALE = PREFIX["text_encoder_2"] + "logit_scale"
POSITION_IDS = PREFIX["text_encoder"] + "embeddings.position_ids"
UNUSED = {SIGMAS, LOGIT_SCALE, POSITION_IDS}  # part of the file, not of the four networks


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor of NeMo's state dict stores one parameter, or several concatenated along the first axis."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]  # shape of the parameter -> shape of the tensor
    parameter: Callable[[torch.Tensor], torch.Tensor]  # the tensor -> the parameter
    tensor: Callable[[list[torch.Tensor]], torch.Tensor]  # all parameters in it -> the tensor
    turn: int = 0  # index of the parameter among those in the tensor


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
    letter: Layout(
        lambda shape: (3 * shape[0], *shape[1:]),
        lambda stored, turn=turn: stored.chunk(3)[turn].clone(),
        torch.cat,
        turn,
    )
    for turn, letter in enumerate("qkv")
}


@dataclass(frozen=True)
class Location:
    """The tensor of a NeMo state dict that holds a parameter of diffusers."""

    key: str
    layout: Layout = SAME


def locations(component: str, names: Iterable[str]) -> dict[str, Location]:
    """Return the key and layout of each parameter of a component, one of ``PREFIX``, by diffusers' name."""
    within = {"unet": _unet, "vae": _vae, "text_encoder": _clip, "text_encoder_2": _open_clip}[component](list(names))
    return {name: Location(PREFIX[component] + place.key, place.layout) for name, place in within.items()}


def _unet(names: list[str]) -> dict[str, Location]:
    return {name: Location(replaced(key, TO_NEMO)) for name, key in sgm_names(names).items()}


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
            inner = renamed(rest.removeprefix("mid_block.attentions.0."), attention)
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
        key = renamed(name, outer)
        if not key.startswith("transformer.resblocks."):
            return Location(key)
        head, rest = re.fullmatch(r"(transformer\.resblocks\.\d+)\.(.*)", key).groups()
        if joined := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            return Location(f"{head}.attn.in_proj_{joined[2]}", THIRDS[joined[1]])
        return Location(f"{head}.{renamed(rest, inner)}")

    return {name: place(name) for name in names}
