"""ControlNets beside a checkpoint's networks: ``model.controlnets``, folders of diffusers' ControlNetModel.

Each is opened as the networks of a pipeline's folder are, and has to fit the denoiser, to whose activations it adds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from sd_quant.checkpoints.diffusers_pipeline import (
    DiffusersCheckpoint,
    check_entries_of,
    entries_in,
    full_config,
    open_network,
)
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
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
    advice = f"as of the {component} that it adds to; give one that was trained for this base"
    for name, (folder, scale) in zip(controlnet_names(len(stated)), stated, strict=True):
        built, components[name] = open_network("model.controlnets", folder, name, KIND)
        config = full_config(built)
        check_entries_of(
            f"model.controlnets names {folder}", entries_in(config, SHARED), entries_in(denoiser, SHARED), advice
        )
        controlnets.append(ControlNet(name, config, scale))
    return replace(checkpoint, components=components, controlnets=tuple(controlnets))
