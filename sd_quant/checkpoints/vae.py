"""Another autoencoder in place of a checkpoint's, such as SDXL's that does not overflow in fp16: ``model.vae``.

A diffusers folder states its own config. A single file has diffusers' names or those of Stability AI's and states none,
so it has to be of the sizes of the checkpoint's own.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from sd_quant.checkpoints.accepted import INDEX
from sd_quant.checkpoints.diffusers_pipeline import (
    DiffusersCheckpoint,
    check_entries_of,
    entries_in,
    full_config,
    open_network,
    weights_of,
)
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.checkpoints.nemo_state import from_nemo
from sd_quant.errors import ConfigError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import Readable
from sd_quant.models.checkpoint import empty_modules
from sd_quant.names.nemo import PREFIX, locations

Opened = DiffusersCheckpoint | NemoCheckpoint
COMPONENT = "vae"
LATENTS = (  # entries of its config that say what latents are; with these the denoiser was trained
    "in_channels", "out_channels", "latent_channels", "scaling_factor", "shift_factor", "latents_mean", "latents_std"
)  # fmt: skip
PREFIXES = ("first_stage_model.", "vae.", "")  # of its tensors in a file
LOSSES = ("loss.", "model_ema.")  # its other tensors, of training


def with_vae(checkpoint: Opened, path: Path) -> Opened:
    """Returns the checkpoint with the autoencoder of ``path``; reads no weight.

    ``path`` is a folder of diffusers' AutoencoderKL or of a pipeline that has one, or a safetensors file.
    Raises ConfigError for another kind of autoencoder, ArtifactError for a damaged or incomplete one.
    """
    own = empty_modules(checkpoint)[COMPONENT]
    folder = path / COMPONENT if (path / INDEX).is_file() else path
    if (folder / "config.json").is_file():
        built, weights = open_network("model.vae", folder, COMPONENT, "AutoencoderKL")
    else:
        built, weights = own, weights_of(path, COMPONENT, "diffusers", own, tensors=stored_vae(path, own))
    config, advice = full_config(built), "with which the denoiser was trained; give an autoencoder of the same latents"
    check_entries_of(f"model.vae names {path}", latents(config), latents(full_config(own)), advice)
    components = checkpoint.components | {COMPONENT: weights}
    if isinstance(checkpoint, NemoCheckpoint):
        return replace(checkpoint, vae=config, components=components)
    return replace(checkpoint, configs=checkpoint.configs | {COMPONENT: config}, components=components)


def latents(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an autoencoder's config says of its latents: their scale, and levels for pixels of each."""
    return entries_in(config, LATENTS) | {"number of block_out_channels": len(config["block_out_channels"])}


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
