"""Build a checkpoint's modules, engines and pipeline; a part is a network, or a method of one, with a graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial

from torch import nn

from sd_quant.engines.base import Engine
from sd_quant.engines.pool import OnDemand
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.pipeline import Pipeline
from sd_quant.inference.stand_ins import AnsweredPart, EngineNetwork
from sd_quant.models.checkpoint import Checkpoint, build_module, contracts_of, denoiser_part
from sd_quant.models.parts import Contract


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint with its networks in torch."""

    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]  # the networks by diffusers' component names
    parts: Mapping[str, nn.Module]  # the same networks wrapped as parts, by the parts' names
    contracts: dict[str, Contract]  # by the parts' names

    @property
    def denoiser(self) -> nn.Module:
        """The network that is quantized."""
        return self.modules[denoiser_part(self.checkpoint).component]

    def torch_engine(self, part: str) -> TorchEngine:
        """Return the part of this name as a torch engine."""
        return TorchEngine(self.parts[part], self.contracts[part])

    def torch_engines(self) -> dict[str, Engine]:
        """Return all parts as torch engines, by name."""
        return {part: self.torch_engine(part) for part in self.parts}


def load_model(checkpoint: Checkpoint) -> LoadedModel:
    """Return the model in fp32 on the CPU. Each network is read on first use."""
    parts = checkpoint.parts()
    modules = OnDemand(checkpoint.components, cache(partial(build_module, checkpoint)))
    wrapped = OnDemand(parts, cache(lambda part: parts[part].wrap(modules[parts[part].component]).eval()))
    return LoadedModel(checkpoint, modules, wrapped, contracts_of(checkpoint))


def load_part(checkpoint: Checkpoint, part: str) -> TorchEngine:
    """Load one part as a torch engine in fp32 on the CPU; closing the engine frees its network."""
    return load_model(checkpoint).torch_engine(part)


def pipeline_of(checkpoint: Checkpoint, engines: Mapping[str, Engine]) -> Pipeline:
    """Build the checkpoint's pipeline with ``engines``, by part, in place of its networks."""
    parts = {name: AnsweredPart(engines, name, part) for name, part in checkpoint.parts().items()}

    def stand_in(component: str, network: nn.Module) -> nn.Module:
        """Return what the pipeline calls as this component: a stand-in, or ``network`` where no part computes it."""
        methods = {each.part.method: each for each in parts.values() if each.part.component == component}
        return EngineNetwork(network, methods) if methods else network

    return Pipeline(checkpoint.called(stand_in), parts)
