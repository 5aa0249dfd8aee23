"""SDXL with NeMo's config, from any kind of file: the networks that the config describes, and their weights.

``sd_quant.models.sdxl_nemo`` says what the entries of a config mean. Here they come from a file, and are checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from sd_quant.checkpoints.nemo_entries import DISCRETIZATION, check_entries, needed_entries
from sd_quant.checkpoints.nemo_state import denoiser_sigmas, from_nemo, text_shapes
from sd_quant.checkpoints.unopened import CONFIG
from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.archive import Member, read_text
from sd_quant.files.checks import MAX_DEPTH, bounded_modules, check_tensors
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.files.schema import check_schema
from sd_quant.files.tensors import Readable, Weights
from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint, empty_modules
from sd_quant.models.controlnet import ControlNets, controlled_call, controlnet_networks, with_controlnets
from sd_quant.models.family import Family, PipelineCall, StandIn, family_named
from sd_quant.models.parts import Part, with_dtypes, with_encoder
from sd_quant.models.sdxl_nemo import (
    PIPELINES,
    NemoConfig,
    NemoDiscretization,
    NemoEmbedder,
    SdxlPipeline,
    TextShape,
    build_modules,
    embedder,
    tokenizers,
    unet_config,
    vae_config,
)
from sd_quant.names.nemo import PREFIX, SIGMAS, UNUSED, locations

UNBUILT = "its configuration does not describe an SDXL that can be built"
SDXL_BASE = Path(__file__).with_name("sdxl_base.yaml")


@dataclass(frozen=True)
class NemoCheckpoint:
    """An opened SDXL, whose weights are complete and of the right shapes. A single file or a folder becomes one too."""

    path: Path
    model_config: dict
    components: dict[str, Weights]  # of "unet", "vae", "text_encoder" and "text_encoder_2"
    clip1: TextShape
    clip2: TextShape
    unused: dict[str, Readable]  # the tensors of ``names.nemo.UNUSED`` that the file holds
    io: str = "nemo"  # whose names the UNet's inputs have
    pipeline: SdxlPipeline = PIPELINES["nemo"]
    vae: Mapping[str, Any] | None = None  # diffusers' config of an autoencoder in place of the one described
    reopen: Callable[[], Checkpoint] | None = None  # opens the same file; None for what is only converted
    encodes: bool = False  # whether the autoencoder's encoder is a part
    dtypes: Dtypes = None  # of exported weights, see ``models.parts``
    controlnets: ControlNets = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of the pipeline's call

    @property
    def family(self) -> Family:
        return family_named("sdxl")

    def parts(self) -> dict[str, Part]:
        configs = {"unet": unet_config(self.model_config), "vae": self.vae or vae_config(self.model_config)}
        parts = self.family.parts(configs, self.pipeline.tokens, self.io)
        parts = with_controlnets(with_encoder(parts, self.encodes), self.family.DENOISER, self.controlnets)
        return with_dtypes(parts, self.dtypes, self.components)

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

    def __reduce__(self):
        """Pickles how the file was opened; another process opens it again."""
        return self.reopen, ()

    def state(self) -> dict[str, Readable]:
        """Returns every tensor by NeMo's key, for ``write_archive``."""
        networks = {key: each for weights in self.components.values() for key, each in weights.tensors.items()}
        return networks | self.unused


def checkpoint_of(path: Path, model_config: dict, state: Mapping[str, Readable], **advice: str) -> NemoCheckpoint:
    """Returns the checkpoint of a state dict under NeMo's keys; reads no weight. ``path`` is for messages.

    Raises ArtifactError, with ``advice``, unless the state holds every weight that the config describes, in its shape,
    and nothing else; and for an entry of the config, or noise levels, that are not computed with.
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
    return NemoCheckpoint(path, model_config, components, clip1, clip2, unused)


def check_values(path: Path, key: str, stored: Readable, whose: str, *expected: torch.Tensor) -> None:
    """Raises ArtifactError unless ``stored`` has the values of one of ``expected``, which are those of ``whose``."""
    near = max(1e-3, 2 * torch.finfo(stored.dtype).eps) if stored.dtype.is_floating_point else 0.0
    shaped = [each.double() for each in expected if each.shape == stored.shape]
    if not any(torch.allclose(stored.read().double(), each, rtol=near, atol=1e-6) for each in shaped):
        raise ArtifactError(
            f"{path}: the values of {key} are not those of {whose}, with which images are made; use those of one "
            "training, or give a diffusers folder that states them"
        )


def described_networks(path: Path, config: dict, clip1: TextShape, clip2: TextShape) -> dict[str, torch.nn.Module]:
    """Builds the four networks of a ``model_config.yaml`` on the meta device: shapes without memory.

    Raises ArtifactError, which names ``path``, when the networks cannot be built.
    """
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
    """Raises ArtifactError, which names ``path``, for an entry that is read and is missing or out of bounds."""
    with refusing(f"{path}: {UNBUILT}"):
        check_schema(NemoConfig, config)
        check_schema(NemoEmbedder, embedder(config, 2), "conditioner_config.emb_models[2].emb_model.")
        noise = config.get("denoiser_config", {}).get("discretization_config", {})
        check_schema(NemoDiscretization, noise, f"{DISCRETIZATION}.", whole=False)


def parameter_shapes(modules: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shape of each parameter by component and diffusers' name."""
    return {
        component: {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        for component, module in modules.items()
    }


def read_config(member: Member) -> dict:
    """Returns what ``config_in`` returns of a ``model_config.yaml``."""
    return config_in(member.name, read_text(member))


def config_in(name: str, text: bytes) -> dict:
    """Returns the mapping in a text of YAML, without NeMo's ``model:`` around it.

    Raises ArtifactError, which gives ``name``, when it holds anything else.
    """
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
    """Returns the content of NeMo's ``model_config.yaml`` of SDXL base."""
    return yaml.safe_load(SDXL_BASE.read_text(encoding="utf-8"))
