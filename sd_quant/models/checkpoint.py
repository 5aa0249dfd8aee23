"""Interface of an opened checkpoint, whatever its file format and family, and functions on checkpoints."""

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from sd_quant.files.images import identities
from sd_quant.models.family import Family, PipelineCall, StandIn
from sd_quant.models.parts import Contract, Part, network_in, wrapped
from sd_quant.models.roles import roles_of
from sd_quant.names.diffusers import TIED


class Checkpoint(Protocol):
    """An opened checkpoint; the readers in ``sd_quant.checkpoints`` return objects with this interface.

    A weight is read from the file each time it is looked up. A checkpoint can be pickled: the other process opens the
    file again.
    """

    @property
    def components(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of each network; networks and weights have diffusers' names."""
        ...

    @property
    def family(self) -> Family: ...

    def parts(self) -> dict[str, Part]:
        """Return the exported parts by name, the denoiser first."""
        ...

    def build(self) -> dict[str, nn.Module]:
        """Build the networks by component, with newly initialized weights, or without weights on the meta device."""
        ...

    def called(self, stand_in: StandIn) -> PipelineCall:
        """Return the pipeline, with ``stand_in``'s result in place of each network, and how the pipeline is called."""
        ...


class InPlace:
    """A checkpoint that presents another ``part`` as its denoiser, for functions that treat only the denoiser."""

    def __init__(self, checkpoint: Checkpoint, part: str):
        self.checkpoint, self.part, self.components = checkpoint, part, checkpoint.components
        self.parts, self.build, self.called = checkpoint.parts, checkpoint.build, checkpoint.called
        self.family = copy.copy(checkpoint.family)
        self.family.DENOISER = part


class OtherNetwork(InPlace):
    """A checkpoint that presents a text encoder or an autoencoder as its denoiser."""


def in_place(checkpoint: Checkpoint, part: str) -> Checkpoint:
    """Return the ``checkpoint``, presenting ``part`` as its denoiser unless ``part`` is the denoiser already."""
    if part == checkpoint.family.DENOISER:
        return checkpoint
    return (InPlace if part in checkpoint.family.DENOISERS else OtherNetwork)(checkpoint, part)


def contracts_of(checkpoint: Checkpoint) -> dict[str, Contract]:
    """Return the contract of every part by name: names, shapes and dtypes of its tensors."""
    return {name: part.contract for name, part in checkpoint.parts().items()}


def key_of(checkpoint: Checkpoint) -> str:
    """Return a cache key of the settings beside the files: parts' contracts, and arguments of the pipeline's call."""
    return repr((contracts_of(checkpoint), identities(getattr(checkpoint, "arguments", {}))))


def denoisers_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the parts that are called in the denoising steps, the quantized part first."""
    return list(dict.fromkeys([checkpoint.family.DENOISER, *checkpoint.family.DENOISERS]))


def denoiser_part(checkpoint: Checkpoint) -> Part:
    """Return the denoiser's part, which is the part that is quantized."""
    return checkpoint.parts()[checkpoint.family.DENOISER]


def denoiser_of(checkpoint: Checkpoint, part: nn.Module) -> nn.Module:
    """Return the network inside the wrapped denoiser ``part``."""
    return network_in(denoiser_part(checkpoint), part)


def denoiser_weights(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """Return the denoiser's weights by diffusers' names; each weight is read when it is looked up."""
    return checkpoint.components[denoiser_part(checkpoint).component]


def empty_modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """Return the networks by component on the meta device, with structure and configuration but no numbers."""
    with torch.device("meta"):
        return checkpoint.build()


def empty_denoiser(checkpoint: Checkpoint) -> nn.Module:
    """Return the denoiser's network on the meta device."""
    return empty_modules(checkpoint)[denoiser_part(checkpoint).component]


def empty_part(checkpoint: Checkpoint, name: str) -> nn.Module:
    """Return a part's network on the meta device as the part wraps it; layer names are relative to this module."""
    part = checkpoint.parts()[name]
    return network_in(part, part.wrap(empty_modules(checkpoint)[part.component]))


def roles_of_part(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Return the role of each layer of a part other than the denoiser; layers missing in its graph are "excluded"."""
    part = checkpoint.parts()[name]
    module = part.wrap(empty_modules(checkpoint)[part.component])
    return roles_of(network_in(part, module), (*part.excluded, *getattr(module, "unread", ())))


def empty_call(
    checkpoint: Checkpoint, part: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a part's module and inputs of these ``shapes`` on the meta device, for a call that computes nothing.

    Make the call in ``torch.device("meta")``, so that tensors that the network creates are on the meta device, too.
    """
    description = checkpoint.parts()[part]
    contract = description.contract
    with torch.device("meta"):
        module = description.wrap(checkpoint.build()[description.component]).to("meta", contract.weights)
        inputs = {name: torch.empty(shape, dtype=contract.dtypes[name]) for name, shape in shapes.items()}
    return module.eval(), inputs


def part_parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of parameters of each part; for the part ``vae`` only the decoder's."""
    parts = wrapped(checkpoint.parts(), empty_modules(checkpoint))
    return {part: sum(parameter.numel() for parameter in module.parameters()) for part, module in parts.items()}


def build_module(checkpoint: Checkpoint, component: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a network with its weights in ``dtype``, on the CPU, in eval mode and without gradients.

    The network is built on the meta device and then filled, so memory peaks at one copy of the weights plus a tensor.
    """
    source, module = checkpoint.components[component], empty_modules(checkpoint)[component]
    state = {name: source[name].to(dtype) for name in module.state_dict() if name in source}
    state |= {name: state[stored] for name, stored in TIED.items() if {name, stored} <= state.keys()}  # one memory
    missing, _ = module.load_state_dict(state, assign=True, strict=False)
    assert not missing, missing  # the reader has checked that every weight is there
    for owner in module.modules():
        positions = owner._buffers.get("position_ids")
        if positions is not None and positions.is_meta:  # in no checkpoint, so still on the meta device
            owner._buffers["position_ids"] = torch.arange(positions.shape[-1])[None]
    return module.eval().requires_grad_(False)


def samples_per_image(checkpoint: Checkpoint, guidance_scale: float) -> int:
    """Return the samples in the denoiser's batch for each image: 2 with classifier-free guidance, else 1."""
    embedded = "timestep_cond" in denoiser_part(checkpoint).contract.inputs  # then guidance is an input of the network
    return 2 if checkpoint.family.GUIDES and guidance_scale > 1 and not embedded else 1
