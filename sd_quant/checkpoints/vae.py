"""Another autoencoder in place of a checkpoint's, such as SDXL's that does not overflow in fp16: ``model.vae``.

A diffusers folder states its own config. A single file has diffusers' names or those of Stability AI's and states none,
so it has to be of the sizes of the checkpoint's own.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_quant.checkpoints.accepted import INDEX
from sd_quant.checkpoints.diffusers_pipeline import (
    AGAIN,
    DiffusersCheckpoint,
    fitted,
    full_config,
    network,
    network_config,
    weights_of,
)
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.checkpoints.nemo_state import from_nemo
from sd_quant.errors import ConfigError
from sd_quant.files import refusing
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import bounded_modules
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import Readable
from sd_quant.models.checkpoint import empty_modules
from sd_quant.names.nemo import PREFIX, locations

Opened = DiffusersCheckpoint | NemoCheckpoint
COMPONENT, LIBRARY, KIND = "vae", "diffusers", "AutoencoderKL"
LATENTS = (  # entries of its config that say what latents are; with these the denoiser was trained
    "in_channels", "out_channels", "latent_channels", "scaling_factor", "shift_factor", "latents_mean", "latents_std"
)  # fmt: skip
PREFIXES = ("first_stage_model.", "vae.", "")  # of its tensors in a file
LOSSES = ("loss.", "model_ema.")  # its other tensors, of training


def with_vae(checkpoint: Opened, path: Path) -> Opened:
    """Returns the checkpoint with the autoencoder of ``path``; reads no weight.

    ``path`` is a folder of diffusers' AutoencoderKL or of a pipeline that has one, or a safetensors file.
    Raises ConfigError for another kind of file or of autoencoder, ArtifactError for a damaged or incomplete one.
    """
    own = empty_modules(checkpoint)[COMPONENT]
    folder = path / COMPONENT if (path / INDEX).is_file() else path
    if (folder / "config.json").is_file():
        config = network_config(folder, KIND)
        if config.get("_class_name", KIND) != KIND:
            raise ConfigError(
                f"model.vae names {path}, which is of {str(config['_class_name'])[:100]}, expected {KIND}; give one of "
                "that class, or use model=diffusers with its pipeline"
            )
        with refusing(f"{folder} describes no {KIND} that can be built", advice=AGAIN):
            with torch.device("meta"), bounded_modules():
                built = network(KIND, config)
        weights = weights_of(folder, COMPONENT, LIBRARY, built)
    elif path.suffix.lower() == ".safetensors" and path.is_file():
        built, weights = own, fitted(path, COMPONENT, LIBRARY, stored_vae(path, own), own)
    else:
        raise ConfigError(
            f"model.vae names {path}, expected a folder of an {KIND}, with config.json, or a .safetensors file; "
            "give one of these"
        )
    found = full_config(built)
    check_latents(path, found, full_config(own))
    if isinstance(checkpoint, NemoCheckpoint):
        return replace(checkpoint, vae=found, components=checkpoint.components | {COMPONENT: weights})
    configs = checkpoint.configs | {COMPONENT: found}
    return replace(checkpoint, configs=configs, components=checkpoint.components | {COMPONENT: weights})


def check_latents(path: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ConfigError for an autoencoder of other latents than the ``own`` one, which the denoiser knows."""
    for entry in LATENTS:
        found, expected = (list(each) if isinstance(each := of[entry], tuple) else each for of in (config, own))
        if found != expected:
            raise ConfigError(
                f"model.vae names {path}, whose {entry} is {str(found)[:100]}, expected {expected}, with which the "
                "denoiser was trained; give an autoencoder of the same latents"
            )
    levels, expected = len(config["block_out_channels"]), len(own["block_out_channels"])
    if levels != expected:
        raise ConfigError(
            f"model.vae names {path}, with {levels} block_out_channels, expected {expected}, which decide how many "
            "pixels a latent is; give an autoencoder of the same latents"
        )


def stored_vae(path: Path, own: nn.Module) -> dict[str, Readable]:
    """Returns the tensors of an autoencoder like ``own`` in a file, which may hold other networks, by diffusers' names.

    Raises ConfigError for a file that holds none.
    """
    stored = read_safetensors(whole_file(path))
    prefix = next(each for each in PREFIXES if any(name.startswith(each) for name in stored) or not each)
    found: dict[str, Readable] = {
        plain: tensor for name, tensor in stored.items()
        if name.startswith(prefix) and not (plain := name.removeprefix(prefix)).startswith(LOSSES)
    }  # fmt: skip
    if not any(name.startswith("decoder.") for name in found):
        raise ConfigError(f"model.vae names {path}, which holds no autoencoder; give a file or a folder with one")
    shapes = {name: tuple(parameter.shape) for name, parameter in own.named_parameters()}
    for name, place in locations(COMPONENT, shapes).items():
        if (tensor := found.pop(place.key.removeprefix(PREFIX[COMPONENT]), None)) is not None:
            found[name] = tensor
            if tensor.shape == place.layout.shape(shapes[name]):
                found[name] = from_nemo({name: place}, shapes, {place.key: tensor})[name]
    return found
