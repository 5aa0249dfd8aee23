"""Networks from separate files: a replacement autoencoder (``model.vae``), ControlNets (``model.controlnets``).

Each has to fit the denoiser: an autoencoder has the latents of its training, a ControlNet the activations to which it
adds. A diffusers folder states its config. A single file of an autoencoder has tensor names of diffusers or Stability
AI, and must have the sizes of the checkpoint's own autoencoder.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from sd_quant.checkpoints.diffusers_network import full_config, network_class, read_network, weights_of
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint, from_nemo
from sd_quant.checkpoints.unopened import INDEX
from sd_quant.errors import ConfigError
from sd_quant.files.archive import whole_file
from sd_quant.files.folders import read_json
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import Readable, Weights
from sd_quant.models import controlnet_names
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser, empty_modules
from sd_quant.models.controlnet import KIND, ControlNet
from sd_quant.names.nemo import PREFIX, locations

Opened = DiffusersCheckpoint | NemoCheckpoint
SHARED = (  # entries that must be equal in a ControlNet's config and the denoiser's
    "in_channels", "block_out_channels", "layers_per_block", "cross_attention_dim", "addition_embed_type",
    "addition_time_embed_dim", "projection_class_embeddings_input_dim",
)  # fmt: skip
VAE = "vae"
LATENTS = (  # entries of an autoencoder's config about its latents
    "in_channels", "out_channels", "latent_channels", "scaling_factor", "shift_factor", "latents_mean", "latents_std"
)  # fmt: skip
PREFIXES = ("first_stage_model.", "vae.", "")  # of an autoencoder's tensors in a file
LOSSES = ("loss.", "model_ema.")  # an autoencoder's tensors for training only


def with_vae(checkpoint: Opened, path: Path) -> Opened:
    """Return the checkpoint with the autoencoder of ``path``; reads no weight.

    ``path`` is a folder of diffusers' AutoencoderKL or of a pipeline that has one, or a safetensors file.
    Raises ConfigError for an autoencoder of another kind, ArtifactError for a damaged or incomplete one.
    """
    own = empty_modules(checkpoint)[VAE]
    folder = path / VAE if (path / INDEX).is_file() else path
    if (folder / "config.json").is_file():
        built, weights = open_network("model.vae", folder, VAE, "AutoencoderKL")
    else:
        built, weights = own, weights_of(path, VAE, own, tensors=stored_vae(path, own))
    config, advice = full_config(built), "with which the denoiser was trained; give an autoencoder of the same latents"
    check_alike(f"model.vae names {path}", latents(config), latents(full_config(own)), advice)
    components = checkpoint.components | {VAE: weights}
    if isinstance(checkpoint, DiffusersCheckpoint):
        return replace(checkpoint, configs=checkpoint.configs | {VAE: config}, components=components)
    return replace(checkpoint, vae=config, components=components)


def latents(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an autoencoder's config about its latents, and the number of its levels."""
    return entries_in(config, LATENTS) | {"number of block_out_channels": len(config["block_out_channels"])}


def stored_vae(path: Path, own: nn.Module) -> dict[str, Readable]:
    """Return a file's autoencoder tensors by the names of diffusers' ``own``. Raises ConfigError if there are none."""
    stored = read_safetensors(whole_file(path))
    prefix = next(each for each in PREFIXES if any(name.startswith(each) for name in stored) or not each)
    plain = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    found: dict[str, Readable] = {name: each for name, each in plain.items() if not name.startswith(LOSSES)}
    if not any(name.startswith("decoder.") for name in found):
        raise ConfigError(f"model.vae names {path}, which holds no autoencoder; give a file or a folder with one")
    shapes = {name: tuple(parameter.shape) for name, parameter in own.named_parameters()}
    for name, place in locations(VAE, shapes).items():
        if (tensor := found.pop(place.key.removeprefix(PREFIX[VAE]), None)) is not None:
            found[name] = tensor
            if tensor.shape == place.layout.shape(shapes[name]):
                found[name] = from_nemo({name: place}, shapes, {place.key: tensor})[name]
    return found


def with_controlnets(checkpoint: Opened, stated: Sequence[tuple[Path, float]]) -> Opened:
    """Return the checkpoint with these ControlNets, given as (folder, scale); reads no weight.

    Raises ConfigError for another kind of network or a ControlNet of another base, ArtifactError for a damaged or
    incomplete folder.
    """
    denoiser, component = full_config(empty_denoiser(checkpoint)), denoiser_part(checkpoint).component
    controlnets, components = list[ControlNet](), dict(checkpoint.components)
    advice = f"as of the {component} that it adds to; give one that was trained for this base"
    for name, (folder, scale) in zip(controlnet_names(len(stated)), stated, strict=True):
        built, components[name] = open_network("model.controlnets", folder, name, KIND)
        config = full_config(built)
        own, expected = entries_in(config, SHARED), entries_in(denoiser, SHARED)
        check_alike(f"model.controlnets names {folder}", own, expected, advice)
        controlnets.append(ControlNet(name, config, scale))
    return replace(checkpoint, components=components, controlnets=tuple(controlnets))


def without_controlnets(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without ControlNets: a pipeline folder holds none, and applications add their own."""
    if not (names := [each.name for each in getattr(checkpoint, "controlnets", ())]):
        return checkpoint
    opened = cast(Opened, checkpoint)
    components = {name: weights for name, weights in opened.components.items() if name not in names}
    return replace(opened, components=components, controlnets=())


def open_network(knob: str, folder: Path, component: str, kind: str) -> tuple[nn.Module, Weights]:
    """Open the network in ``folder``; reads no weight. Raises ConfigError if no ``kind``, ArtifactError if damaged."""
    if (found := read_json(folder, "config.json").get("_class_name", kind)) != kind:
        raise ConfigError(
            f"{knob} names {folder}, which is of {str(found)[:100]}, expected {kind}; give one of it, or use "
            "model=diffusers with the pipeline that has it"
        )
    return read_network(folder, component, network_class(kind), ())[1:]


def entries_in(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the entries ``names`` of ``config``, with tuples as lists, as JSON would have them."""
    return {name: list(each) if isinstance(each := config[name], tuple) else each for name in names}


def check_alike(what: str, own: Mapping[str, Any], expected: Mapping[str, Any], advice: str) -> None:
    """Raise ConfigError for the first of a network's ``own`` config entries that differs from the ``expected`` one."""
    for name, found in own.items():
        if found != expected[name]:
            raise ConfigError(
                f"{what}, whose {name} is {str(found)[:100]}, expected {str(expected[name])[:100]}, {advice}"
            )
