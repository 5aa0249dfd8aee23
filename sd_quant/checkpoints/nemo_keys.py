"""NeMo's state dict of SDXL: under which key, and how, each weight of diffusers lies there, and what else it holds.

``locations`` maps the parameter names of a component to keys. The names alone decide: they tell how many ResBlocks a
level has, and which levels attend. NeMo's UNet keys are neither SGM's nor diffusers': its GroupNorm fuses the SiLU, so
indices in a ResBlock shift by one.
The road not taken is NeMo's own converter: it walks a fixed list that renames within the first block of each
transformer only, and so leaves 590 of 1680 UNet tensors random.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch

from sd_quant.checkpoints.tensors import LazyTensor, Readable, lazy
from sd_quant.models.sdxl_nemo import TextShape

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


def from_nemo(
    places: Mapping[str, Location], shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Readable]
) -> dict[str, LazyTensor]:
    """Returns the parameters of a component by diffusers' names; ``shapes`` are theirs, ``state`` is NeMo's."""
    return {
        name: LazyTensor(
            shapes[name], state[place.key].dtype, lambda place=place: place.parameter(state[place.key].read())
        )
        for name, place in places.items()
    }


def to_nemo(component: str, parameters: Mapping[str, Readable]) -> dict[str, LazyTensor]:
    """Returns the part of a NeMo state dict that holds ``component``, from its parameters by diffusers' names."""
    held: dict[str, list[tuple[str, Location]]] = {}
    for name, place in locations(component, parameters).items():
        held.setdefault(place.key, []).append((name, place))
    state = {}
    for key, places in held.items():
        places.sort(key=lambda item: item[1].layout)  # the thirds of a tensor in their order
        sources = [parameters[name] for name, _ in places]
        place = places[0][1]
        state[key] = LazyTensor(
            place.stored_shape(tuple(sources[0].shape)),
            reduce(torch.promote_types, (source.dtype for source in sources)),
            lambda place=place, sources=sources: place.tensor([source.read() for source in sources]),
        )
    return state


def state_of(components: Mapping[str, Mapping[str, Readable]], model_config: dict) -> dict[str, Readable]:
    """Returns NeMo's whole state dict for the parameters of the four networks by diffusers' names."""
    dtype = components["text_encoder_2"]["text_projection.weight"].dtype
    return network_state(components) | unused_state(dtype, model_config["denoiser_config"]["num_idx"])


def network_state(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, Readable]:
    """Returns the part of NeMo's state dict that belongs to the four networks."""
    state: dict[str, Readable] = {}
    for component in PREFIX:
        state |= to_nemo(component, components[component])
    return state


def unused_state(dtype: torch.dtype, steps: int) -> dict[str, Readable]:
    """Returns what NeMo stores beside the networks, for weights that come from elsewhere.

    CLIP's temperature, a scalar of ``dtype``, has the value that training starts with: only training uses it. The noise
    levels are fp32 [steps].
    """
    logit_scale = torch.tensor(math.log(1 / 0.07))
    return {LOGIT_SCALE: lazy(logit_scale, dtype), SIGMAS: lazy(denoiser_sigmas(steps))}


def denoiser_sigmas(count: int) -> torch.Tensor:
    """Returns the noise levels of SGM's DiscreteDenoiser on LegacyDDPMDiscretization: fp32 [count], ascending."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, count, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    return ((1 - alphas) / alphas).sqrt().float()


def locations(component: str, names: Iterable[str]) -> dict[str, Location]:
    """Returns the location of each parameter of a component, one of ``PREFIX``, by diffusers' name."""
    within = {"unet": _unet, "vae": _vae, "text_encoder": _clip, "text_encoder_2": _open_clip}[component](list(names))
    return {name: Location(PREFIX[component] + place.key, place.layout) for name, place in within.items()}


def text_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TextShape, TextShape]:
    """Returns the sizes of both text encoders, read from the shapes of their weights by NeMo's keys.

    Raises KeyError, IndexError or ValueError when a weight that tells a size is missing or has another rank.
    """
    clip, open_clip = PREFIX["text_encoder"], PREFIX["text_encoder_2"]
    vocab_size, width = shapes[clip + "embeddings.token_embedding.weight"]
    clip1 = TextShape(
        vocab_size=vocab_size,
        width=width,
        layers=_count_indices(shapes, clip + "encoder.layers."),
        context=shapes[clip + "embeddings.position_embedding.weight"][0],
        mlp_width=shapes[clip + "encoder.layers.0.mlp.fc1.weight"][0],
    )
    vocab_size, width = shapes[open_clip + "token_embedding.weight"]
    clip2 = TextShape(
        vocab_size=vocab_size,
        width=width,
        layers=_count_indices(shapes, open_clip + "transformer.resblocks."),
        context=shapes[open_clip + "positional_embedding"][0],
        mlp_width=shapes[open_clip + "transformer.resblocks.0.mlp.c_fc.weight"][0],
        projection=shapes[open_clip + "text_projection"][1],
    )
    return clip1, clip2


def _count_indices(names: Iterable[str], prefix: str) -> int:
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
    resnets_down = _count_indices(names, "down_blocks.0.resnets.")
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
    last_level = _count_indices(names, "decoder.up_blocks.") - 1
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
