"""From an opened checkpoint to something that makes pictures."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sd_quant.checkpoints.nemo import Checkpoint, build_pipeline_modules, check_finite
from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.pipeline import Pipeline
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.parts import Contract, contracts, wrap
from sd_quant.models.sdxl import build_modules, scheduler, unet_config


@dataclass(frozen=True)
class LoadedModel:
    """``modules`` under diffusers' component names, the same networks as ``parts`` under NeMo's."""

    checkpoint: Checkpoint
    modules: dict[str, nn.Module]
    parts: dict[str, nn.Module]
    contracts: dict[str, Contract]

    def torch_engines(self) -> dict[str, Engine]:
        return {name: TorchEngine(part, self.contracts[name]) for name, part in self.parts.items()}


def contracts_of(checkpoint: Checkpoint) -> dict[str, Contract]:
    return contracts(unet_config(checkpoint.model_config))


def empty_modules(checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """The networks' structure and configuration without their weights."""
    with torch.device("meta"):
        return build_modules(checkpoint.model_config, checkpoint.clip1, checkpoint.clip2)


def load_model(checkpoint: Checkpoint) -> LoadedModel:
    """Every network in fp32 on the CPU. Raises ArtifactError when a weight is NaN or infinite."""
    for source in checkpoint.components.values():
        check_finite(source)
    modules = build_pipeline_modules(checkpoint)
    return LoadedModel(checkpoint, modules, wrap(modules), contracts_of(checkpoint))


def pipeline_of(checkpoint: Checkpoint, engines: Mapping[str, Engine]) -> Pipeline:
    """CLIP-L pads with its end marker, OpenCLIP with id 0, which is an exclamation mark."""
    tokenizers = clip_tokenizer(checkpoint.clip1.vocab_size), clip_tokenizer(checkpoint.clip2.vocab_size, "!")
    modules = empty_modules(checkpoint)
    return Pipeline(engines, tokenizers, modules["unet"].config, modules["vae"].config, scheduler())
