"""Under which names trainers store the low-rank updates of a layer.

diffusers and PEFT write the layer's own name behind the component's, kohya's scripts write it with underscores for
dots, and some train the networks as their authors name them. So every name of every layer is made here and looked up,
and no key of a file is taken apart.
The road not taken is diffusers' converters (loaders/lora_conversion_utils.py), which rewrite keys with some forty
replacements in turn: a key of another network comes out as some name, and is found not to fit later, or never.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sd_quant.checkpoints.sgm import sgm_names
from sd_quant.checkpoints.tensors import Readable

WEIGHT = ".weight"
DENOISERS = ("unet", "transformer")
OF_DENOISER = ("", "base_model.model.", "diffusion_model.", "model.diffusion_model.")  # before a denoiser's name
FLAT_OF_DENOISER = ("lora_unet_", "lora_transformer_")  # the same of kohya's
ATTENTION = re.compile(r"(.*\.attn\d?)\.((?:add_|to_)\w+)(?:\.0)?")  # diffusers once kept updates in its processors

# Black Forest Labs' names in Flux's blocks, and diffusers'; several of these are parts of the rows of one of those.
FLUX_BLOCKS = {
    "transformer_blocks": ("double_blocks", {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "img_attn.proj": ("attn.to_out.0",),
        "img_mlp.0": ("ff.net.0.proj",),
        "img_mlp.2": ("ff.net.2",),
        "img_mod.lin": ("norm1.linear",),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "txt_attn.proj": ("attn.to_add_out",),
        "txt_mlp.0": ("ff_context.net.0.proj",),
        "txt_mlp.2": ("ff_context.net.2",),
        "txt_mod.lin": ("norm1_context.linear",),
    }),
    "single_transformer_blocks": ("single_blocks", {
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "linear2": ("proj_out",),
        "modulation.lin": ("norm.linear",),
    }),
}  # fmt: skip
FLUX_ENDS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}


@dataclass(frozen=True)
class Place:
    """A layer that an update is of."""

    component: str
    layer: str  # diffusers' name
    shape: tuple[int, ...]  # of its weight
    first: int = 0  # row of the update at which this layer's begin: another network may have several layers in one


def places_by_name(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, list[list[Place]]]:
    """Every name that updates of the linears and convolutions have somewhere.

    ``components`` are parameters by diffusers' names. A name has several meanings where it does not tell in which of
    two text encoders the layer is; each meaning is the layers whose rows lie in one update.
    """
    found: dict[str, list[list[Place]]] = defaultdict(list)
    encoders = 0
    for component, parameters in components.items():
        layers = {
            name.removesuffix(WEIGHT): Place(component, name.removesuffix(WEIGHT), tuple(tensor.shape))
            for name, tensor in parameters.items()
            if name.endswith(WEIGHT) and len(tensor.shape) in (2, 4)
        }
        if component in DENOISERS:
            names = _denoiser_names(component, layers)
        elif component.startswith("text_encoder"):
            encoders += 1
            names = _encoder_names(component, encoders, layers)
        else:
            continue
        for name, places in names:
            if places not in found[name]:
                found[name].append(places)
    return dict(found)


def _denoiser_names(component: str, layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    named = [(layer, [place]) for layer, place in layers.items()] + list(_names_elsewhere(layers))
    for name, places in named:
        for prefix in (*OF_DENOISER, f"{component}."):
            yield prefix + name, places
        for prefix in FLAT_OF_DENOISER:
            yield prefix + flat(name), places
    for layer, place in layers.items():
        if attention := ATTENTION.fullmatch(layer):
            for prefix in ("", f"{component}."):
                yield f"{prefix}{attention[1]}.processor.{attention[2]}", [place]


def _encoder_names(component: str, number: int, layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    for layer, place in layers.items():
        plain = layer.removeprefix("text_model.")  # which only some versions of transformers have
        for name in (plain, f"text_model.{plain}"):
            for prefix in (f"{component}.", "base_model.model."):
                yield prefix + name, [place]
            for prefix in (f"lora_te{number}_", *(["lora_te_"] if number == 1 else [])):
                yield prefix + flat(name), [place]


def _names_elsewhere(layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    """The names that the authors of SDXL and of Flux have for the layers. The names of the layers tell which it is."""
    if "add_embedding.linear_1" in layers:
        for name, key in sgm_names([layer + WEIGHT for layer in layers]).items():
            yield key.removesuffix(WEIGHT), [layers[name.removesuffix(WEIGHT)]]
    if "single_transformer_blocks.0.proj_mlp" in layers:
        for theirs, ours in FLUX_ENDS.items():
            if ours in layers:  # without guidance there is no guidance_embedder
                yield theirs, [layers[ours]]
        for blocks, (their_blocks, table) in FLUX_BLOCKS.items():
            count = len({layer.split(".")[1] for layer in layers if layer.startswith(f"{blocks}.")})
            for index in range(count):
                for theirs, parts in table.items():
                    yield (
                        f"{their_blocks}.{index}.{theirs}",
                        stacked([layers[f"{blocks}.{index}.{part}"] for part in parts]),
                    )


def stacked(places: list[Place]) -> list[Place]:
    """The layers whose rows lie one after the other in one update."""
    first, result = 0, []
    for place in places:
        result.append(Place(place.component, place.layer, place.shape, first))
        first += place.shape[0]
    return result


def flat(name: str) -> str:
    """kohya's form of a name."""
    return name.replace(".", "_")
