"""Convert SDXL between NeMo archives, diffusers folders and single files in Stability AI's layout.

    sd-quant convert SOURCE TARGET [--config model_config.yaml] [--fp16]

SOURCE is a ``.nemo`` archive, a folder of diffusers' StableDiffusionXLPipeline, or a ``.safetensors`` file in Stability
AI's layout. A TARGET that ends with ``.nemo`` becomes an archive, one with ``.safetensors`` a single file, any other a
diffusers folder. Every source is opened as the same checkpoint class, whose keys and shapes are known before a byte is
written, and is written one tensor at a time.
Alternative not taken: one converter per direction, each with its own table of names; NeMo's own leaves 590 of the
UNet's 1680 tensors random.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sd_quant.checkpoints.nemo import open_nemo, write_archive
from sd_quant.checkpoints.nemo_and_diffusers import open_diffusers, scheduler_entries, write_diffusers
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint, read_config
from sd_quant.checkpoints.single_file import ZERO_SNR, open_single_file, single_file_of
from sd_quant.checkpoints.unopened import INDEX
from sd_quant.errors import ArtifactError, ConfigError, exit_with_its_code
from sd_quant.files import check_room
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor, Readable, size_of
from sd_quant.models.sdxl_nemo import noise_config
from sd_quant.progress import progress
from sd_quant.shell import literal, pasted

ARCHIVE, SINGLE = ".nemo", ".safetensors"
FILES = (
    ".ckpt .pt .pth .bin .onnx .gguf .plan .npz .tar .gz .tgz .zip .txt .json .yaml .yml .csv .md .html .xml .png .log"
)


def open_sdxl(path: Path, model_config: dict | None = None) -> NemoCheckpoint:
    """Open SDXL; ``model_config`` is NeMo's. Raises ConfigError for a wrong kind of file, ArtifactError if damaged."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a .nemo archive, a diffusers folder or a .safetensors file")
    if (path / INDEX).is_file():
        return open_diffusers(path, model_config)
    if path.suffix.lower() == SINGLE:
        return open_single_file(path, model_config)
    if model_config is not None:
        raise ConfigError(f"--config is given, but {path} has a model_config.yaml of its own; leave --config out")
    if path.suffix.lower() == ARCHIVE or path.is_dir():
        return open_nemo(path)
    raise ConfigError(f"{path} is of no known kind; give a .nemo archive, a diffusers folder or a .safetensors file")


def convert(source: Path, target: Path, model_config: dict | None = None, fp16: bool = False) -> int:
    """Write ``source`` to ``target``, in its own dtypes or with weights in ``fp16``; return the number of tensors.

    Raises ConfigError for an unusable ``source`` or an existing ``target``, ArtifactError for a damaged source and for
    tensors or noise levels that the target's format cannot hold, ResourceError for a full disk.
    """
    kind = target.suffix.lower()
    if kind in FILES.split():  # no folder is called that
        raise ConfigError(
            f"{target} ends with {target.suffix}; give a name with .nemo or .safetensors, or one of a folder for "
            "diffusers"
        )
    empty_folder = kind not in (ARCHIVE, SINGLE) and target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty_folder:
        raise ConfigError(f"{target} exists already; give another name or remove it")
    checkpoint = open_sdxl(source, model_config)
    if fp16:
        checkpoint = in_half(checkpoint)
    state = checkpoint.state()
    folder = next(folder for folder in target.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is no folder that can be written to; give another target than {target}")
    check_room(target, size_of(state.values()))
    if kind == SINGLE:
        tensors, metadata = single_file_of(checkpoint)
        count, write = len(tensors), partial(write_safetensors, target, tensors, metadata=metadata)
    elif kind == ARCHIVE:
        if noise_config(checkpoint.model_config)[ZERO_SNR]:
            raise ArtifactError(
                f"{source} has a terminal SNR of zero, which no config of NeMo's can state; give a folder as the target"
            )
        count, write = len(state), partial(write_archive, target, checkpoint.model_config, state)
    else:
        count = sum(map(len, checkpoint.components.values())) + len(checkpoint.unused)
        write = partial(write_diffusers, target, checkpoint)
    with progress(count, f"write {target.name}") as advance:
        write(advance=advance)
    return count


def in_half(checkpoint: NemoCheckpoint) -> NemoCheckpoint:
    """Return the checkpoint with its networks' weights in fp16; reading one that overflows raises ArtifactError."""

    def halved(name: str, stored: Readable) -> torch.Tensor:
        whole = stored.read()
        half = whole.half()
        if bool((half.isinf() & whole.isfinite()).any()):
            raise ArtifactError(
                f"{checkpoint.path}: {ascii(name)[:200]} has numbers beyond 65504, the largest of fp16; convert it "
                "without --fp16"
            )
        return half

    def all_halved(tensors: Mapping[str, Readable]) -> dict[str, Readable]:
        return {name: LazyTensor(tuple(each.shape), torch.float16, partial(halved, name, each))
                for name, each in tensors.items()}  # fmt: skip

    return replace(checkpoint, components={
        component: replace(each, parameters=all_halved(each.parameters), tensors=all_halved(each.tensors))
        for component, each in checkpoint.components.items()
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="sd-quant convert",
        description="Convert SDXL between NeMo's archive, a diffusers folder and Stability AI's single file.",
    )
    parser.add_argument("source", type=Path, help="a .nemo archive, a diffusers folder, or a single .safetensors file")
    parser.add_argument("target", type=Path, help="a name with .nemo or .safetensors, or that of a diffusers folder")
    parser.add_argument("--fp16", action="store_true", help="store weights in fp16; by default they keep their dtypes")
    parser.add_argument("--config", type=Path, help="NeMo's model_config.yaml, if SDXL base's does not fit the source")
    given = parser.parse_args()
    model_config = None if given.config is None else read_config(whole_file(given.config))
    count = convert(given.source, given.target, model_config, given.fp16)
    archive, single = (given.target.suffix.lower() == kind for kind in (ARCHIVE, SINGLE))
    family = "sdxl_nemo" if archive else "sdxl"
    following = pasted("quantize", f"model={family}", "quant_level=3", f"model.path={literal(given.target)}")
    size = sum(file.stat().st_size for file in (given.target, *given.target.rglob("*")) if file.is_file())
    written = f"{size / 1e9:.2f} GB, {count} tensors"
    if archive and (given.source / INDEX).is_file():
        written += f", and NeMo's Euler sampler in place of {scheduler_entries(given.source)['_class_name']}"
    elif single:
        written += ", for 77 tokens and SDXL base's EulerDiscreteScheduler, because a single file names no sampler"
    print(f"{given.target}: {written}; next: {following}")


if __name__ == "__main__":
    exit_with_its_code(main)
