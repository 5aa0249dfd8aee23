"""Names under which LoRA trainers store the updates of a layer.

diffusers and PEFT write the component's name and the layer's own, kohya's scripts write underscores for dots, and some
trainers use the original checkpoint's names. So all possible names of all layers are listed here, and a file's keys are
looked up, not parsed.
Alternative not taken: diffusers' converters (loaders/lora_conversion_utils.py), which rewrite keys with some forty
replacements in turn: a key of another network becomes some name, and is found not to fit later, or never.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from sd_quant.files.tensors import Readable
from sd_quant.names.diffusers import DENOISERS
from sd_quant.names.sgm import sgm_names
from sd_quant.names.transformers import layout_of, stored_names

WEIGHT, BIAS = ".weight", ".bias"
OF_DENOISER = (  # prefixes of the denoiser's layers
    "", "base_model.model.", "diffusion_model.", "model.diffusion_model.", "unet.", "transformer.",
)  # fmt: skip
FLAT_OF_DENOISER = ("lora_unet_", "lora_transformer_", "lycoris_")  # prefixes of kohya's, OneTrainer's and LyCORIS'
ATTENTION = re.compile(r"(.*\.attn\d?)\.((?:add_|to_)\w+)(?:\.0)?")  # old diffusers kept updates in its processors


@dataclass(frozen=True)
class Place:
    """A layer's weight or bias that a LoRA update changes."""

    component: str
    layer: str  # diffusers' name
    shape: tuple[int, ...]  # of the parameter
    first: int = 0  # its first row in an update that joins several layers; after the last row the first one follows
    biased: bool = False  # whether the layer has a bias
    kind: str = WEIGHT  # or BIAS


def places_by_name(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, list[list[Place]]]:
    """Map each possible name of a LoRA update to its meanings: lists of layers, joined along the first axis.

    ``components`` are parameters by diffusers' names. A name that leaves the text encoder open has several meanings.
    """
    found: dict[str, list[list[Place]]] = defaultdict(list)
    encoders = 0
    for component, parameters in components.items():
        layers = _layers(component, parameters)
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


def diffusers_places(
    components: Mapping[str, Mapping[str, Readable]], denoiser: str, called: str
) -> dict[str, list[list[Place]]]:
    """Map LoRA names of diffusers and PEFT, such as ``unet.<layer>``, to the layers of networks of any class.

    ``called`` is the prefix of layers of the ``denoiser`` in diffusers' files; PEFT's files may have none.
    """
    found: dict[str, list[list[Place]]] = {}
    for component, parameters in components.items():
        prefixes = (f"{called}.", "base_model.model.", "") if component == denoiser else ()
        for layer, place in _layers(component, parameters).items():
            plain = layer.removeprefix("text_model.")  # which only some versions of transformers have
            names = (plain, f"text_model.{plain}") if component.startswith("text_encoder") else (layer,)
            found |= {prefix + name: [[place]] for prefix in (f"{component}.", *prefixes) for name in names}
    return found


def _layers(component: str, parameters: Mapping[str, Readable]) -> dict[str, Place]:
    """Return every layer that has a weight (linears, convolutions, norms, embeddings), by name."""
    return {
        layer: Place(component, layer, tuple(tensor.shape), biased=layer + BIAS in parameters)
        for name, tensor in parameters.items()
        if name.endswith(WEIGHT) and tensor.shape and (layer := name.removesuffix(WEIGHT))
    }


def _denoiser_names(component: str, layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    named = [(layer, [place]) for layer, place in layers.items()] + list(_names_elsewhere(layers))
    for name, places in named:
        for prefix in OF_DENOISER:
            yield prefix + name, places
        for prefix in FLAT_OF_DENOISER:
            yield prefix + name.replace(".", "_"), places
    for layer, place in layers.items():
        if attention := ATTENTION.fullmatch(layer):
            for prefix in ("", f"{component}."):
                yield f"{prefix}{attention[1]}.processor.{attention[2]}", [place]


def _encoder_names(component: str, number: int, layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    is_t5 = "encoder.block.0.layer.0.SelfAttention.q" in layers
    numbers = {str(number)} | ({"3"} if is_t5 else set()) | ({""} if number == 1 else set())  # Flux's T5 has kohya's 3
    in_comfyui = ["t5xxl"] if is_t5 else ["clip_l", "clip_h"] if number == 1 else ["clip_g"]
    prefixes = (component, "base_model.model", *(f"text_encoders.{each}.transformer" for each in in_comfyui))
    for layer, place in layers.items():
        plain = layer.removeprefix("text_model.")  # which only some versions of transformers have
        for name in (plain, f"text_model.{plain}"):
            for prefix in prefixes:
                yield f"{prefix}.{name}", [place]
            for each in numbers:
                yield f"lora_te{each}_{name.replace('.', '_')}", [place]


def _names_elsewhere(layers: Mapping[str, Place]) -> Iterator[tuple[str, list[Place]]]:
    """Yield names in the original checkpoint layout, each with diffusers' layers that it joins."""
    if "mid_block.resnets.0.conv1" in layers:
        for name, key in sgm_names([layer + WEIGHT for layer in layers]).items():
            yield key.removesuffix(WEIGHT), [layers[name.removesuffix(WEIGHT)]]
        return
    for name, parts in stored_names(layers, layout_of(layers)).items():
        firsts = accumulate((layers[part].shape[0] for part in parts), initial=0)
        places = [replace(layers[part], first=first) for part, first in zip(parts, firsts, strict=False)]
        (rows, *columns), owner = places[0].shape, parts[0].rpartition(".")[0].rpartition(".")[2]
        if owner in ("norm_out", "norm1_context") and name != parts[0] and [rows] == [2 * each for each in columns]:
            places = [replace(places[0], first=rows // 2)]  # a shift and a scale, which diffusers has exchanged
        yield name, places
