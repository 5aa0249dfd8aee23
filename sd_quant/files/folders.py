"""Folders in the layout of diffusers' ``save_pretrained``: JSON, and weights in one file or in shards.

Weights are read from safetensors files only. A file name in an index is accepted only if its folder has that file.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import Member, open_members, read_text
from sd_quant.files.safetensors import read_object, read_safetensors
from sd_quant.files.tensors import StoredTensor

WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}  # file names by library


def files_in(folder: Path) -> dict[str, Member]:
    """Return the files of a folder by name. Raises ArtifactError when there is no such folder."""
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is missing; expected the whole folder of a pipeline, so fetch it again")
    return open_members(folder)


def read_json(folder: Path, name: str) -> dict:
    """Return the object in a JSON file. Raises ArtifactError when it is missing or holds anything else."""
    files = files_in(folder)
    if name not in files:
        raise ArtifactError(f"{folder} holds no {name}; expected the whole folder of a pipeline, so fetch it again")
    return read_object(files[name].name, read_text(files[name]))


def stored_weights(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """Return the tensors of ``<stem>.safetensors``, its shards, or a sole variant. Raises ArtifactError if missing."""
    files = files_in(folder)
    variant, end = r"(?:\.([^.]+))?", r"(?<!-of-\d{5})\.safetensors"
    found: dict[str, list[str]] = {}  # one file, then an index of shards, by variant
    for rule in (rf"{stem}{variant}{end}", rf"{stem}{variant}{end}{variant}\.index{variant}\.json"):
        for name in sorted(files):
            if match := re.fullmatch(rule, name):
                found.setdefault(next(filter(None, match.groups()), ""), []).append(name)
    if not found:
        raise ArtifactError(
            f"{folder} holds no {stem}.safetensors, no variant of it such as {stem}.fp16.safetensors and no index of "
            "shards; expected weights as safetensors, so fetch those, or save the pipeline again with "
            "safe_serialization=True"
        )
    if "" not in found and len(found) > 1:
        several = ", ".join(ascii(names[0][:200])[1:-1] for names in found.values())
        raise ArtifactError(
            f"{folder} holds no {stem}.safetensors but several variants of it ({several}), expected one; move the "
            f"others away, or give one the name {stem}.safetensors"
        )
    (name, *_) = found[""] if "" in found else next(iter(found.values()))
    return _shards(folder, name, files) if name.endswith(".json") else read_safetensors(files[name])


def _shards(folder: Path, index: str, files: Mapping[str, Member]) -> dict[str, StoredTensor]:
    weight_map = read_json(folder, index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(map(str, names)):
        if name not in files:
            raise ArtifactError(
                f"{folder / index} names the shard {name[:200]!r}, which is no file of that folder; fetch it again"
            )
        shard = read_safetensors(files[name])
        if double := tensors.keys() & shard.keys():
            raise ArtifactError(f"{folder} holds {min(double)[:200]!r} in two shards; expected it once, fetch it again")
        tensors |= shard
    return tensors
