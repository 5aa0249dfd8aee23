"""An opened checkpoint, whatever its kind of file and its family, and what can be said of it without a runtime.

The readers in ``sd_quant.checkpoints`` return one. It knows its family, its parts and how its networks are built.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from sd_quant.models.family import Family, PipelineAdapter
from sd_quant.models.parts import Contract, Part, wrapped


class Checkpoint(Protocol):
    """What the readers in ``sd_quant.checkpoints`` return.

    A weight is read from the file each time it is looked up, and not before. A checkpoint can be pickled: the other
    process opens the file again.
    """

    @property
    def components(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of each network, both by diffusers' names."""
        ...

    @property
    def family(self) -> Family: ...

    def parts(self) -> dict[str, Part]:
        """The exported parts by name, the denoiser first."""
        ...

    def build(self) -> dict[str, nn.Module]:
        """The networks by component, with fresh weights; inside ``torch.device("meta")`` their structure alone."""
        ...

    def adapter(self, networks: Mapping[str, nn.Module]) -> PipelineAdapter:
        """The family's pipeline with these networks in it, by component."""
        ...


def contracts_of(checkpoint: Checkpoint) -> dict[str, Contract]:
    """The contract of every part by name."""
    return {name: part.contract for name, part in checkpoint.parts().items()}


def denoiser_part(checkpoint: Checkpoint) -> Part:
    """The part that is quantized."""
    return checkpoint.parts()[checkpoint.family.DENOISER]


def denoiser_of(checkpoint: Checkpoint, part: nn.Module) -> nn.Module:
    """The network inside ``part``, the wrapped denoiser. The names of layers in an assignment are relative to it."""
    return part.get_submodule(denoiser_part(checkpoint).prefix.removesuffix("."))


def denoiser_weights(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """The denoiser's weights by diffusers' names, each read when it is looked up."""
    return checkpoint.components[denoiser_part(checkpoint).component]


def empty_modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """The networks by component on the meta device: structure and configuration without weights."""
    with torch.device("meta"):
        return checkpoint.build()


def empty_denoiser(checkpoint: Checkpoint) -> nn.Module:
    """The denoiser's network on the meta device."""
    return empty_modules(checkpoint)[denoiser_part(checkpoint).component]


def part_parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of parameters of each part. Only the decoder of the VAE counts."""
    parts = wrapped(checkpoint.parts(), empty_modules(checkpoint))
    return {part: sum(parameter.numel() for parameter in module.parameters()) for part, module in parts.items()}


def build_module(checkpoint: Checkpoint, component: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network with its weights in ``dtype``, on the CPU, in eval mode and without gradients.

    It is built on the meta device and then filled, so memory peaks at one copy of the weights and one tensor more.
    """
    source, module = checkpoint.components[component], empty_modules(checkpoint)[component]
    state = {name: source[name].to(dtype) for name in module.state_dict() if name in source}
    missing, _ = module.load_state_dict(state, assign=True, strict=False)
    assert not missing, missing  # the reader has checked that every weight is there
    for owner in module.modules():
        positions = owner._buffers.get("position_ids")
        if positions is not None:  # in no checkpoint, so still on the meta device
            owner._buffers["position_ids"] = torch.arange(positions.shape[-1])[None]
    return module.eval().requires_grad_(False)


def reads_guidance(checkpoint: Checkpoint) -> bool:
    """Whether the guidance scale changes anything: the weight of a second pass, or an input of the denoiser."""
    return checkpoint.family.GUIDES or "guidance" in denoiser_part(checkpoint).contract.inputs


def samples_per_image(checkpoint: Checkpoint, guidance_scale: float) -> int:
    """Samples in the denoiser's batch for each image: 2 with classifier-free guidance, with and without the prompt."""
    return 2 if checkpoint.family.GUIDES and guidance_scale > 1 else 1
