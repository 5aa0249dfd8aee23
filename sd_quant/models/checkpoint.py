"""What an opened checkpoint is, of whatever kind of file and family, and what follows from it without a runtime.

A reader in ``sd_quant.checkpoints`` returns one. It knows its family, its parts and how its networks are built; no
weight is read until somebody asks for it.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from sd_quant.models import Family
from sd_quant.models.parts import Contract, Part, PipelineAdapter, wrapped


class Checkpoint(Protocol):
    """What a reader in ``sd_quant.checkpoints`` returns. No weight is read until one of ``components`` is asked for.
    It can be pickled: another process opens the file again.

    ``components``: a network's name in diffusers to its weights by diffusers' names.
    """

    @property
    def components(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    @property
    def family(self) -> Family: ...

    def parts(self) -> dict[str, Part]: ...

    def build(self) -> dict[str, nn.Module]:
        """The networks with fresh weights; inside ``torch.device("meta")`` the structure alone."""
        ...

    def adapter(self, networks: Mapping[str, nn.Module]) -> PipelineAdapter:
        """``networks`` by component, to be put into a pipeline."""
        ...


def contracts_of(checkpoint: Checkpoint) -> dict[str, Contract]:
    return {name: part.contract for name, part in checkpoint.parts().items()}


def denoiser_part(checkpoint: Checkpoint) -> Part:
    return checkpoint.parts()[checkpoint.family.DENOISER]


def denoiser_of(checkpoint: Checkpoint, part: nn.Module) -> nn.Module:
    """The network inside the wrapped denoiser: what an assignment's names are relative to."""
    return part.get_submodule(denoiser_part(checkpoint).prefix.removesuffix("."))


def denoiser_weights(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    return checkpoint.components[denoiser_part(checkpoint).component]


def empty_modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """The networks' structure and configuration without their weights."""
    with torch.device("meta"):
        return checkpoint.build()


def empty_denoiser(checkpoint: Checkpoint) -> nn.Module:
    return empty_modules(checkpoint)[denoiser_part(checkpoint).component]


def part_parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """How many numbers the weights of each part are; the VAE's is the decoder alone."""
    parts = wrapped(checkpoint.parts(), empty_modules(checkpoint))
    return {part: sum(parameter.numel() for parameter in module.parameters()) for part, module in parts.items()}


def build_module(checkpoint: Checkpoint, component: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network with its weights, in ``dtype``, in eval mode and without gradients, on the CPU.

    The peak is one copy of the weights and one tensor: the network is built without memory, then filled.
    """
    source, module = checkpoint.components[component], empty_modules(checkpoint)[component]
    state = {name: source[name].to(dtype) for name in module.state_dict() if name in source}
    missing, _ = module.load_state_dict(state, assign=True, strict=False)
    assert not missing, missing  # the reader has compared all names
    for owner in module.modules():
        positions = owner._buffers.get("position_ids")
        if positions is not None:  # 0, 1, 2, ... and in no checkpoint, so still without memory
            owner._buffers["position_ids"] = torch.arange(positions.shape[-1])[None]
    return module.eval().requires_grad_(False)


def build_pipeline_modules(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, nn.Module]:
    """All networks."""
    return {component: build_module(checkpoint, component, dtype) for component in checkpoint.components}


def samples_per_image(checkpoint: Checkpoint, guidance_scale: float) -> int:
    """Of the denoiser: classifier-free guidance computes every step with the text and without."""
    return 2 if checkpoint.family.GUIDES and guidance_scale > 1 else 1
