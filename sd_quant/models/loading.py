"""From an opened checkpoint to something that makes pictures."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sd_quant.checkpoints.nemo import Checkpoint, build_module
from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.pipeline import Pipeline
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.parts import COMPONENTS, Contract, contracts, wrap, wrap_part
from sd_quant.models.sdxl import build_modules, scheduler, unet_config


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
    """``modules`` under diffusers' component names, the same networks as ``parts`` under NeMo's."""

    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]
    parts: Mapping[str, nn.Module]
    contracts: dict[str, Contract]

    def torch_engine(self, part: str) -> Engine:
        return TorchEngine(self.parts[part], self.contracts[part])

    def torch_engines(self) -> dict[str, Engine]:
        return {part: self.torch_engine(part) for part in self.parts}


def contracts_of(checkpoint: Checkpoint) -> dict[str, Contract]:
    return contracts(unet_config(checkpoint.model_config))


def empty_modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """The networks' structure and configuration without their weights."""
    with torch.device("meta"):
        return build_modules(checkpoint.model_config, checkpoint.clip1, checkpoint.clip2)


def part_parameters(checkpoint: Checkpoint) -> dict[str, int]:
    """How many numbers the weights of each part are; the VAE's is the decoder alone."""
    parts = wrap(empty_modules(checkpoint))
    return {part: sum(parameter.numel() for parameter in module.parameters()) for part, module in parts.items()}


def load_model(checkpoint: Checkpoint) -> LoadedModel:
    """The networks in fp32 on the CPU; each is read from the checkpoint when it is first asked for."""
    modules = Networks(checkpoint.components, lambda component: build_module(checkpoint, component))
    parts = Networks(
        COMPONENTS, lambda part: wrap_part(part, modules[COMPONENTS[part][0]], checkpoint.clip2.projection)
    )
    return LoadedModel(checkpoint, modules, parts, contracts_of(checkpoint))


def load_part(checkpoint: Checkpoint, part: str) -> Engine:
    """One part in torch, which goes when the engine is closed."""
    return load_model(checkpoint).torch_engine(part)


def pipeline_of(checkpoint: Checkpoint, engines: Mapping[str, Engine]) -> Pipeline:
    """CLIP-L pads with its end marker, OpenCLIP with id 0, which is an exclamation mark."""
    tokenizers = clip_tokenizer(checkpoint.clip1.vocab_size), clip_tokenizer(checkpoint.clip2.vocab_size, "!")
    modules = empty_modules(checkpoint)
    return Pipeline(engines, tokenizers, modules["unet"].config, modules["vae"].config, scheduler())
