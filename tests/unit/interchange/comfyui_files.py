"""Files of ComfyUI's kind of tiny checkpoints."""

import json

import torch
from safetensors.torch import save_file
from torch import Tensor

from sd_quant.interchange.denoiser import needed
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import authors_places


def chosen(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2 and min(tensor.shape) >= 16 and "embed" not in name


def mark_of(mark: dict | bytes) -> Tensor:
    return torch.tensor(list(mark if isinstance(mark, bytes) else json.dumps(mark).encode()), dtype=torch.uint8)


def save(path, tensors, prefix: str = "", metadata=None) -> None:
    save_file({prefix + name: each.contiguous() for name, each in tensors.items()}, path, metadata)


def authors_layers(checkpoint) -> dict[str, str]:
    """The authors' layer, or the first of them, by the name that a layer of diffusers has."""
    network = empty_denoiser(checkpoint)
    places = authors_places(network, {name: tuple(each.shape) for name, each in needed(network).items()})
    end = ".weight"
    return {name.removesuffix(end): parts[0].name.removesuffix(end) for name, parts in places.items()}
