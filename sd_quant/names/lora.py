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

from sd_quant.files.tensors import Readable
from sd_quant.names import transformers
from sd_quant.names.sgm import sgm_names

WEIGHT = ".weight"
DENOISERS = ("unet", "transformer")
OF_DENOISER = ("", "base_model.model.", "diffusion_model.", "model.diffusion_model.")  # before a denoiser's name
FLAT_OF_DENOISER = ("lora_unet_", "lora_transformer_")  # the same of kohya's
ATTENTION = re.compile(r"(.*\.attn\d?)\.((?:add_|to_)\w+)(?:\.0)?")  # diffusers once kept updates in its processors


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
        for name, parts in transformers.stored_names(layers, transformers.FLUX).items():
            if name != transformers.EXCHANGED:
                yield name, stacked([layers[part] for part in parts])


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
