"""Names under which trainers store the low-rank updates of a layer.

diffusers and PEFT write the component's name and the layer's own, kohya's scripts write underscores for dots, and some
trainers use the authors' names. So every possible name of every layer is made here and looked up; no key of a file is
taken apart.
The road not taken is diffusers' converters (loaders/lora_conversion_utils.py), which rewrite keys with some forty
replacements in turn: a key of another network becomes some name, and is found not to fit later, or never.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sd_quant.files.tensors import Readable
from sd_quant.names import transformers
from sd_quant.names.diffusers import DENOISERS
from sd_quant.names.sgm import sgm_names

WEIGHT = ".weight"
OF_DENOISER = ("", "base_model.model.", "diffusion_model.", "model.diffusion_model.")  # prefixes of its layers
FLAT_OF_DENOISER = ("lora_unet_", "lora_transformer_")  # kohya's prefixes
ATTENTION = re.compile(r"(.*\.attn\d?)\.((?:add_|to_)\w+)(?:\.0)?")  # old diffusers kept updates in its processors


@dataclass(frozen=True)
class Place:
    """A layer that an update belongs to."""

    component: str
    layer: str  # diffusers' name
    shape: tuple[int, ...]  # of its weight
    first: int = 0  # first row of the layer in the update, which may hold several layers


def places_by_name(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, list[list[Place]]]:
    """Returns the meanings of every name that an update of a linear or convolution can have.

    ``components`` are parameters by diffusers' names. A name has several meanings where it does not say which of two
    text encoders the layer belongs to. A meaning is a list of layers whose rows one update holds.
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
    """Yields the authors' names of SDXL's and Flux's layers. The names of the layers tell which network it is."""
    if "add_embedding.linear_1" in layers:
        for name, key in sgm_names([layer + WEIGHT for layer in layers]).items():
            yield key.removesuffix(WEIGHT), [layers[name.removesuffix(WEIGHT)]]
    if "single_transformer_blocks.0.proj_mlp" in layers:
        for name, parts in transformers.stored_names(layers, transformers.FLUX).items():
            if name != transformers.EXCHANGED:
                yield name, stacked([layers[part] for part in parts])


def stacked(places: list[Place]) -> list[Place]:
    """Returns the layers with their first rows in an update that holds all of them, one below the other."""
    first, result = 0, []
    for place in places:
        result.append(Place(place.component, place.layer, place.shape, first))
        first += place.shape[0]
    return result


def flat(name: str) -> str:
    """Returns kohya's form of a name."""
    return name.replace(".", "_")
