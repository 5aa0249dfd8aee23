"""Write a diffusers pipeline folder that lacks the weights of some networks.

From a checkpoint in diffusers' layout the files are copied, except the weights of a replaced autoencoder and weights
that a LoRA changes, which are written anew, and networks that the checkpoint was opened without. An archive or a single
file is converted.
"""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from sd_quant.checkpoints.diffusers_pipeline import ABSENT
from sd_quant.checkpoints.nemo_and_diffusers import write_pipeline
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.checkpoints.other_networks import without_controlnets
from sd_quant.checkpoints.unopened import INDEX
from sd_quant.files import write_json
from sd_quant.files.folders import WEIGHTS
from sd_quant.files.safetensors import write_safetensors
from sd_quant.models.checkpoint import Checkpoint, empty_modules

COPIED = (".json", ".txt", ".model", ".safetensors")  # no code, and nothing that would have to be unpickled


def copy_files(source: Path, target: Path, without: str | None = None) -> None:
    """Copy a folder's own regular files, and links to files, that a pipeline reads; skip names with ``without``."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name.lower().endswith(COPIED) and not (without is not None and without in file.name):
            shutil.copyfile(file, target / file.name)


def write_pipeline_without(checkpoint: Checkpoint, components: Collection[str], folder: Path) -> None:
    """Write model_index.json, scheduler, tokenizers, configs and all weights except those of ``components``.

    ControlNets are left out. Raises ArtifactError for a vocabulary that is not CLIP's, ResourceError when the disk is
    full.
    """
    checkpoint = without_controlnets(checkpoint)
    if isinstance(checkpoint, NemoCheckpoint):
        return write_pipeline(folder, checkpoint, without=components)
    opened = cast(Any, checkpoint)  # a DiffusersCheckpoint, or the checkpoint of a recorded pipeline: the same fields

    absent = [name for name, described in opened.index.items() if described == ABSENT]
    swapped = [name for name, weights in opened.components.items() if weights.path != opened.path / name]
    changed = {name for name, weights in opened.components.items() if weights.adapted or name in swapped}

    copy_files(opened.path, folder)
    for place in sorted(opened.path.iterdir()):  # and no path that is made of a name in a file
        if place.is_dir() and not place.is_symlink() and place.name in opened.index.keys() - absent:
            written = place.name in (*components, *changed)
            copy_files(place, folder / place.name, without=".safetensors" if written else None)
    write_json(folder / INDEX, opened.index)
    for component in swapped:
        empty_modules(checkpoint)[component].save_config(folder / component)
    for component in sorted(changed.difference(components)):
        name = f"{WEIGHTS[opened.index[component][0]]}.safetensors"
        write_safetensors(folder / component / name, opened.components[component].parameters)
