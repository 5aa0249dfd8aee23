"""From an opened checkpoint, of whatever kind and family, to something that makes pictures.

A checkpoint says what its family is, which parts it has, how to build its networks and how it draws; here that becomes
modules, engines and a pipeline.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.pipeline import Drawing, EngineNetwork, Pipeline
from sd_quant.models import Family
from sd_quant.models.parts import Contract, Part, wrapped


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

    def drawing(self, networks: Mapping[str, EngineNetwork]) -> Drawing:
        """``networks`` by component, to be put into a pipeline."""
        ...


class Networks(Mapping[str, nn.Module]):
    """Networks by name, each made when it is first asked for, and kept."""

    def __init__(self, names: Mapping[str, object] | list[str], make: Callable[[str], nn.Module]):
        self.names, self.make, self.made = list(names), make, dict[str, nn.Module]()

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self.made:
            if name not in self.names:
                raise KeyError(name)
            self.made[name] = self.make(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class LoadedModel:
    """``modules`` under diffusers' component names, the same networks as ``parts`` under those of exported parts."""

    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]
    parts: Mapping[str, nn.Module]
    contracts: dict[str, Contract]

    @property
    def denoiser(self) -> nn.Module:
        return self.modules[denoiser_part(self.checkpoint).component]

    def torch_engine(self, part: str) -> Engine:
        return TorchEngine(self.parts[part], self.contracts[part])

    def torch_engines(self) -> dict[str, Engine]:
        return {part: self.torch_engine(part) for part in self.parts}


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


def load_model(checkpoint: Checkpoint) -> LoadedModel:
    """The networks in fp32 on the CPU; each is read from the checkpoint when it is first asked for."""
    parts = checkpoint.parts()
    modules = Networks(list(checkpoint.components), lambda component: build_module(checkpoint, component))
    made = Networks(list(parts), lambda part: parts[part].wrap(modules[parts[part].component]).eval())
    return LoadedModel(checkpoint, modules, made, contracts_of(checkpoint))


def load_part(checkpoint: Checkpoint, part: str) -> Engine:
    """One part in torch, which goes when the engine is closed."""
    return load_model(checkpoint).torch_engine(part)


def pipeline_of(checkpoint: Checkpoint, engines: Mapping[str, Engine]) -> Pipeline:
    modules = empty_modules(checkpoint)
    networks = {
        part.component: EngineNetwork(engines, name, part, modules[part.component])
        for name, part in checkpoint.parts().items()
    }
    return Pipeline(engines, checkpoint.drawing(networks))


def samples_a_picture(checkpoint: Checkpoint, guidance_scale: float) -> int:
    """Of the denoiser: classifier-free guidance computes every step with the text and without."""
    return 2 if checkpoint.family.GUIDES and guidance_scale > 1 else 1
