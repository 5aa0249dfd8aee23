"""NeMo's state dict of SDXL: the tensors of the four networks under NeMo's keys, and the other tensors of the file."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import torch

from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.models.sdxl_nemo import TextShape, noise_config
from sd_quant.names.nemo import LOGIT_SCALE, PREFIX, SIGMAS, Location, count_indices, locations


def from_nemo(
    places: Mapping[str, Location], shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Readable]
) -> dict[str, LazyTensor]:
    """Returns the parameters of a component by diffusers' names; ``shapes`` are theirs, ``state`` is NeMo's."""
    return {
        name: LazyTensor(
            shapes[name], state[place.key].dtype, lambda place=place: place.layout.parameter(state[place.key].read())
        )
        for name, place in places.items()
    }


def to_nemo(component: str, parameters: Mapping[str, Readable]) -> dict[str, LazyTensor]:
    """Returns the tensors of ``component`` under NeMo's keys, from its parameters by diffusers' names."""
    places = locations(component, parameters)
    held: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name].layout.turn):  # stable, so the thirds alone move
        held.setdefault(places[name].key, []).append(name)
    state = {}
    for key in dict.fromkeys(place.key for place in places.values()):
        layout, sources = places[held[key][0]].layout, [parameters[name] for name in held[key]]
        state[key] = LazyTensor(
            layout.shape(tuple(sources[0].shape)),
            reduce(torch.promote_types, (source.dtype for source in sources)),
            lambda layout=layout, sources=sources: layout.tensor([source.read() for source in sources]),
        )
    return state


def state_of(components: Mapping[str, Mapping[str, Readable]], model_config: dict) -> dict[str, Readable]:
    """Returns NeMo's whole state dict for the parameters of the four networks by diffusers' names."""
    dtype = components["text_encoder_2"]["text_projection.weight"].dtype
    return network_state(components) | unused_state(dtype, model_config)


def network_state(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, Readable]:
    """Returns the tensors of the four networks under NeMo's keys."""
    return {key: each for name in PREFIX for key, each in to_nemo(name, components[name]).items()}


def unused_state(dtype: torch.dtype, model_config: Mapping) -> dict[str, Readable]:
    """Returns the tensors that NeMo stores beside the networks, for weights from another kind of file.

    CLIP's temperature, a scalar of ``dtype``, has its initial value, because only training uses it.
    """
    logit_scale = torch.tensor(math.log(1 / 0.07))
    return {LOGIT_SCALE: lazy(logit_scale, dtype), SIGMAS: lazy(denoiser_sigmas(model_config))}


def denoiser_sigmas(model_config: Mapping) -> torch.Tensor:
    """Returns the noise levels of SGM's DiscreteDenoiser on LegacyDDPMDiscretization: fp32 [steps], ascending."""
    alphas = torch.cumprod(1 - betas_of(model_config), dim=0)
    return ((1 - alphas) / alphas).sqrt().float()


def betas_of(model_config: Mapping) -> torch.Tensor:
    """Returns the betas of LegacyDDPMDiscretization: fp64 [steps]."""
    noise = noise_config(model_config)
    start, end = noise["beta_start"] ** 0.5, noise["beta_end"] ** 0.5
    return torch.linspace(start, end, noise["num_train_timesteps"], dtype=torch.float64) ** 2


def text_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TextShape, TextShape]:
    """Returns the sizes of both text encoders from the shapes of their weights by NeMo's keys.

    Raises KeyError, IndexError or ValueError when such a weight is missing or has another rank.
    """

    def shape(component: str, tokens: str, layers: str, mlp: str, positions: str) -> TextShape:
        prefix = PREFIX[component]
        vocab_size, width = shapes[prefix + tokens]
        context, mlp_width = shapes[prefix + positions][0], shapes[f"{prefix}{layers}0.{mlp}"][0]
        return TextShape(vocab_size, width, count_indices(shapes, prefix + layers), context, mlp_width)

    tokens, positions = "token_embedding.weight", "embeddings.position_embedding.weight"
    clip1 = shape("text_encoder", f"embeddings.{tokens}", "encoder.layers.", "mlp.fc1.weight", positions)
    clip2 = shape("text_encoder_2", tokens, "transformer.resblocks.", "mlp.c_fc.weight", "positional_embedding")
    return clip1, replace(clip2, projection=shapes[PREFIX["text_encoder_2"] + "text_projection"][1])
