"""SDXL with NeMo's config, from any kind of file: the networks that the config describes, and their state dict.

``sd_quant.models.sdxl_nemo`` defines what the entries of a config mean. Here they come from a file, and are checked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import yaml

from sd_quant.checkpoints.nemo_entries import DISCRETIZATION, check_entries, needed_entries
from sd_quant.checkpoints.opened import OpenedFiles
from sd_quant.checkpoints.unopened import CONFIG
from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.archive import Member, read_text
from sd_quant.files.checks import MAX_DEPTH, bounded_modules, check_tensors
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.files.schema import check_schema
from sd_quant.files.tensors import LazyTensor, Readable, Weights, lazy
from sd_quant.models.checkpoint import empty_modules
from sd_quant.models.controlnet import controlled_call, controlnet_networks
from sd_quant.models.family import PipelineCall, StandIn
from sd_quant.models.parts import Part
from sd_quant.models.sdxl_nemo import (
    PIPELINES,
    NemoConfig,
    NemoDiscretization,
    NemoEmbedder,
    SdxlPipeline,
    TextShape,
    build_modules,
    embedder,
    noise_config,
    tokenizers,
    unet_config,
    vae_config,
)
from sd_quant.names.nemo import LOGIT_SCALE, PREFIX, SIGMAS, UNUSED, Location, count_indices, locations

UNBUILT = "its configuration does not describe an SDXL that can be built"
SDXL_BASE = Path(__file__).with_name("sdxl_base.yaml")


@dataclass(frozen=True, kw_only=True)
class NemoCheckpoint(OpenedFiles):
    """An opened SDXL checkpoint with NeMo's config; single files and converted folders are opened as one too."""

    io: str = "nemo"
    model_config: dict
    clip1: TextShape
    clip2: TextShape
    unused: dict[str, Readable]  # the tensors of ``names.nemo.UNUSED`` that the file holds
    pipeline: SdxlPipeline = PIPELINES["nemo"]
    vae: Mapping[str, Any] | None = None  # diffusers' config of an autoencoder that replaces the described one

    def parts(self) -> dict[str, Part]:
        configs = {"unet": unet_config(self.model_config), "vae": self.vae or vae_config(self.model_config)}
        return self.parts_of(configs, self.pipeline.tokens)

    def build(self) -> dict[str, torch.nn.Module]:
        modules = build_modules(self.model_config, self.clip1, self.clip2)
        vae = {} if self.vae is None else {"vae": type(modules["vae"]).from_config(dict(self.vae))}
        return modules | vae | controlnet_networks(self.controlnets)

    def called(self, stand_in: StandIn) -> PipelineCall:
        networks = {component: stand_in(component, each) for component, each in empty_modules(self).items()}
        sampler = self.pipeline.scheduler(self.model_config)
        own = {name: networks[name] for name in self.family.NETWORKS}
        call = self.pipeline.called(own, tokenizers(self.clip1, self.clip2), sampler)
        return controlled_call(replace(call, arguments=self.arguments), networks, self.controlnets)

    def state(self) -> dict[str, Readable]:
        """Return every tensor by NeMo's key, for ``write_archive``."""
        networks = {key: each for weights in self.components.values() for key, each in weights.tensors.items()}
        return networks | self.unused


def checkpoint_of(path: Path, model_config: dict, state: Mapping[str, Readable], **advice: str) -> NemoCheckpoint:
    """Return the checkpoint of a state dict with NeMo's keys; reads no weight. ``path`` is for messages.

    Raises ArtifactError, with ``advice``, for weights that are missing or that the config does not describe, and for
    unsupported config entries or noise levels.
    """
    stored_shapes = {key: tensor.shape for key, tensor in state.items()}
    what = f"{path} lacks the weights that tell the sizes of its text encoders, or they have another rank"
    both = f"expected SDXL's two, under {PREFIX['text_encoder']} and {PREFIX['text_encoder_2']}"
    with refusing(what, KeyError, IndexError, ValueError, advice=both):
        clip1, clip2 = text_shapes(stored_shapes)
    shapes = parameter_shapes(described_networks(path, model_config, clip1, clip2))
    places = {component: locations(component, shapes[component]) for component in shapes}
    expected = {
        place.key: place.layout.shape(shapes[component][name])
        for component in shapes
        for name, place in places[component].items()
    }
    check_tensors(path, state, expected, UNUSED, **advice)
    with refusing(f"{path}: {CONFIG} cannot be read"):
        check_entries(f"{path}: {CONFIG}", model_config, needed_entries(model_config, sdxl_base_config(), clip1))
    if SIGMAS in state:
        check_values(path, SIGMAS, state[SIGMAS], DISCRETIZATION, denoiser_sigmas(model_config))
    components = {
        component: Weights(
            path, component, from_nemo(places[component], shapes[component], state),
            {place.key: state[place.key] for place in places[component].values()},
        )
        for component in shapes
    }  # fmt: skip
    unused = {key: tensor for key, tensor in state.items() if key in UNUSED}
    return NemoCheckpoint(
        path=path, components=components, model_config=model_config, clip1=clip1, clip2=clip2, unused=unused
    )


def check_values(path: Path, key: str, stored: Readable, whose: str, *expected: torch.Tensor) -> None:
    """Raise ArtifactError unless the tensor ``key`` nearly equals one of ``expected``; ``whose`` is their source."""
    near = max(1e-3, 2 * torch.finfo(stored.dtype).eps) if stored.dtype.is_floating_point else 0.0
    shaped = [each.double() for each in expected if each.shape == stored.shape]
    if not any(torch.allclose(stored.read().double(), each, rtol=near, atol=1e-6) for each in shaped):
        raise ArtifactError(
            f"{path}: the values of {key} are not those of {whose}, with which images are made; use those of one "
            "training, or give a diffusers folder that states them"
        )


def described_networks(path: Path, config: dict, clip1: TextShape, clip2: TextShape) -> dict[str, torch.nn.Module]:
    """Build the networks of a ``model_config.yaml`` on the meta device. Raises ArtifactError for an invalid config."""
    check_described(path, config)
    with refusing(f"{path}: {UNBUILT}"):
        unet, vae = config["unet_config"], config["first_stage_config"]["ddconfig"]
        lists = (unet["channel_mult"], unet["transformer_depth"], vae["ch_mult"], unet["attention_resolutions"])
        if max(*map(len, lists), clip1.layers, clip2.layers) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} blocks")
        if not denoiser_sigmas(config).isfinite().all():
            raise ValueError(f"{DISCRETIZATION} leaves no signal at the last step")
        with torch.device("meta"), bounded_modules():
            return build_modules(config, clip1, clip2)


def check_described(path: Path, config: dict) -> None:
    """Raise ArtifactError, which names ``path``, for an entry in use that is missing or out of bounds."""
    with refusing(f"{path}: {UNBUILT}"):
        check_schema(NemoConfig, config)
        check_schema(NemoEmbedder, embedder(config, 2), "conditioner_config.emb_models[2].emb_model.")
        noise = config.get("denoiser_config", {}).get("discretization_config", {})
        check_schema(NemoDiscretization, noise, f"{DISCRETIZATION}.", whole=False)


def parameter_shapes(modules: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of each parameter, by component and by diffusers' name."""
    return {
        component: {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        for component, module in modules.items()
    }


def read_config(member: Member) -> dict:
    """Return the mapping in a ``model_config.yaml``. Raises ArtifactError for anything else, as ``config_in``."""
    return config_in(member.name, read_text(member))


def config_in(name: str, text: bytes) -> dict:
    """Return the mapping in YAML, without NeMo's ``model:`` wrapper. Raises ArtifactError for anything else."""
    with refusing(f"{name} is not plain YAML", yaml.YAMLError, ValueError, RecursionError):
        config = load_yaml(text)
    if isinstance(config, dict) and isinstance(config.get("model"), dict):  # the wrapper that NeMo's loader accepts too
        with refusing(f"{name} cannot be read"):
            check_entries(name, {entry: each for entry, each in config.items() if entry != "model"}, {})
        config = config["model"]
    if not isinstance(config, dict):
        raise ArtifactError(f"{name} holds a {type(config).__name__}; expected the mapping of an SDXL model section")
    return config


def sdxl_base_config() -> dict:
    """Return the content of NeMo's ``model_config.yaml`` of SDXL base."""
    return yaml.safe_load(SDXL_BASE.read_text(encoding="utf-8"))


# Tensors under NeMo's keys


def from_nemo(
    places: Mapping[str, Location], shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Readable]
) -> dict[str, LazyTensor]:
    """Return a component's parameters by diffusers' names, from NeMo's ``state``; ``shapes`` are the parameters'."""
    return {
        name: LazyTensor(
            shapes[name], state[place.key].dtype, lambda place=place: place.layout.parameter(state[place.key].read())
        )
        for name, place in places.items()
    }


def to_nemo(component: str, parameters: Mapping[str, Readable]) -> dict[str, LazyTensor]:
    """Return the tensors of ``component`` by NeMo's keys, from its parameters by diffusers' names."""
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
    """Return NeMo's whole state dict, from the four networks' parameters by diffusers' names."""
    dtype = components["text_encoder_2"]["text_projection.weight"].dtype
    return network_state(components) | unused_state(dtype, model_config)


def network_state(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, Readable]:
    """Return the tensors of the four networks by NeMo's keys."""
    return {key: each for name in PREFIX for key, each in to_nemo(name, components[name]).items()}


def unused_state(dtype: torch.dtype, model_config: Mapping) -> dict[str, Readable]:
    """Return NeMo's tensors of no network: noise levels, and CLIP's unused temperature (initial value, ``dtype``)."""
    logit_scale = torch.tensor(math.log(1 / 0.07))
    return {LOGIT_SCALE: lazy(logit_scale, dtype), SIGMAS: lazy(denoiser_sigmas(model_config))}


def denoiser_sigmas(model_config: Mapping) -> torch.Tensor:
    """Return the noise levels of SGM's DiscreteDenoiser on LegacyDDPMDiscretization: fp32 [steps], ascending."""
    alphas = torch.cumprod(1 - betas_of(model_config), dim=0)
    return ((1 - alphas) / alphas).sqrt().float()


def betas_of(model_config: Mapping) -> torch.Tensor:
    """Return the betas of LegacyDDPMDiscretization: fp64 [steps]."""
    noise = noise_config(model_config)
    start, end = noise["beta_start"] ** 0.5, noise["beta_end"] ** 0.5
    return torch.linspace(start, end, noise["num_train_timesteps"], dtype=torch.float64) ** 2


def text_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[TextShape, TextShape]:
    """Return both text encoders' sizes. Raises KeyError, IndexError or ValueError if weights are missing or odd."""

    def shape(component: str, tokens: str, layers: str, mlp: str, positions: str) -> TextShape:
        prefix = PREFIX[component]
        vocab_size, width = shapes[prefix + tokens]
        context, mlp_width = shapes[prefix + positions][0], shapes[f"{prefix}{layers}0.{mlp}"][0]
        return TextShape(vocab_size, width, count_indices(shapes, prefix + layers), context, mlp_width)

    tokens, positions = "token_embedding.weight", "embeddings.position_embedding.weight"
    clip1 = shape("text_encoder", f"embeddings.{tokens}", "encoder.layers.", "mlp.fc1.weight", positions)
    clip2 = shape("text_encoder_2", tokens, "transformer.resblocks.", "mlp.c_fc.weight", "positional_embedding")
    return clip1, replace(clip2, projection=shapes[PREFIX["text_encoder_2"] + "text_projection"][1])
