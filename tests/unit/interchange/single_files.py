"""Tiny checkpoints as single files with their authors' names, and the way back, which is diffusers' own."""

import inspect
from collections.abc import Mapping

import torch
from diffusers.loaders import single_file_utils
from torch import Tensor, nn

from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint
from sd_quant.interchange.denoiser import QuantizedDenoiser, needed
from sd_quant.models.checkpoint import denoiser_weights, empty_denoiser
from sd_quant.names.authors import PREFIX, authors_places


def authors_state(checkpoint: DiffusersCheckpoint) -> dict[str, Tensor]:
    return in_authors_rows(checkpoint, denoiser_weights(checkpoint))


def in_authors_rows(checkpoint: DiffusersCheckpoint, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of the denoiser's tensors, or scales of their rows, as its authors name and stack them.

    ``names.test_authors`` holds this against diffusers.
    """
    network = empty_denoiser(checkpoint)
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    state: dict[str, Tensor] = {}
    for name, parts in authors_places(network, shapes).items():
        if name not in tensors:
            continue
        weight, first = tensors[name], 0
        for rows in parts:
            shape = (rows.of, *weight.shape[1:]) if weight.ndim else ()
            stored = state.setdefault(rows.name, torch.zeros(shape).to(weight.dtype))
            stored[rows.start : rows.stop] = weight[first : first + rows.stop - rows.start]
            first += rows.stop - rows.start
    return state


def in_diffusers(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by diffusers' names, as diffusers' own converter makes them of the authors' tensors ``state``."""
    named = {PREFIX + name: tensor for name, tensor in state.items()}
    match type(network).__name__:
        case "UNet2DConditionModel":
            return single_file_utils.convert_ldm_unet_checkpoint(named, dict(network.config))
        case "SD3Transformer2DModel":
            return single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers(named)
    source = inspect.getsource(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    assert "inner_dim = 3072" in source  # the one width that it knows
    known = vars(single_file_utils).copy()
    exec(source.replace("inner_dim = 3072", f"inner_dim = {network.inner_dim}"), known)
    return known["convert_flux_transformer_checkpoint_to_diffusers"](named)


def read_all(candidate: QuantizedDenoiser) -> dict[str, Tensor]:
    layers = {f"{name}.weight": layer.weight for name, layer in candidate.layers.items()}
    return {name: each.read().float() for name, each in {**layers, **candidate.parameters}.items()}
