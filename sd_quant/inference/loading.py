"""From an opened checkpoint, of whatever kind and family, to something that makes pictures.

A checkpoint says what its family is, which parts it has, how to build its networks and how it draws; here that becomes
modules, engines and a pipeline.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.pipeline import EngineNetwork, Pipeline
from sd_quant.models.checkpoint import Checkpoint, build_module, contracts_of, denoiser_part, empty_modules
from sd_quant.models.parts import Contract


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
    return Pipeline(engines, checkpoint.adapter(networks))
