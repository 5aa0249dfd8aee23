"""ControlNets beside a checkpoint's networks: ``model.controlnets``, folders of diffusers' ControlNetModel.

Each is opened as the networks of a pipeline's folder are, and has to fit the denoiser, to whose activations it adds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from sd_quant.checkpoints.diffusers_pipeline import (
    AGAIN,
    DiffusersCheckpoint,
    full_config,
    network,
    network_config,
    weights_of,
)
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.errors import ConfigError
from sd_quant.files import refusing
from sd_quant.files.checks import bounded_modules
from sd_quant.files.folders import read_json
from sd_quant.models import controlnet_names
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.models.controlnet import KIND, ControlNet

Opened = DiffusersCheckpoint | NemoCheckpoint
SHARED = (  # entries that its config has in common with the denoiser's: shapes of what both read, and what it adds to
    "in_channels", "block_out_channels", "layers_per_block", "cross_attention_dim", "addition_embed_type",
    "addition_time_embed_dim", "projection_class_embeddings_input_dim",
)  # fmt: skip


def without_controlnets(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint without its ControlNets: a pipeline's folder has none, and an application adds its own."""
    if not (names := [each.name for each in getattr(checkpoint, "controlnets", ())]):
        return checkpoint
    opened = cast(Opened, checkpoint)
    components = {name: weights for name, weights in opened.components.items() if name not in names}
    return replace(opened, components=components, controlnets=())


def with_controlnets(checkpoint: Opened, stated: Sequence[tuple[Path, float]]) -> Opened:
    """Returns the checkpoint with these ControlNets, each a folder and a scale; reads no weight.

    Raises ConfigError for another kind of network, or one of another base, ArtifactError for a damaged or incomplete
    folder.
    """
    denoiser, component = full_config(empty_denoiser(checkpoint)), denoiser_part(checkpoint).component
    controlnets, components = list[ControlNet](), dict(checkpoint.components)
    for name, (folder, scale) in zip(controlnet_names(len(stated)), stated, strict=True):
        found = read_json(folder, "config.json").get("_class_name")
        if found != KIND:
            raise ConfigError(
                f"model.controlnets names {folder}, which is of {str(found)[:100]}, expected {KIND}; give one of "
                "it, or use model=diffusers with the pipeline that has it"
            )
        config = network_config(folder, KIND)
        with refusing(f"{folder} describes no {KIND} that can be built", advice=AGAIN):
            with torch.device("meta"), bounded_modules():
                built = network(KIND, config)
        config = full_config(built)
        for entry in SHARED:
            own, expected = (
                list(each) if isinstance(each, tuple) else each for each in (config[entry], denoiser[entry])
            )
            if own != expected:
                raise ConfigError(
                    f"model.controlnets names {folder}, whose {entry} is {str(own)[:100]}, expected "
                    f"{str(expected)[:100]}, as of the {component} that it adds to; give one that was trained for this "
                    "base"
                )
        controlnets.append(ControlNet(name, config, scale))
        components[name] = weights_of(folder, name, "diffusers", built)
    return replace(checkpoint, components=components, controlnets=tuple(controlnets))
