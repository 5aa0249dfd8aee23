"""SDXL in NeMo's archive and in Stability AI's single file: opens both, writes the archive.

An archive is a tar of two files, ``model_config.yaml`` and ``model_weights.ckpt``, which torch.save wrote. Opening
reads the config and the directory of the weights, and compares every key and shape with the networks that the config
describes. It reads no weight.
The road not taken is NeMo's SaveRestoreConnector: it extracts the archive, unpickles and instantiates ``target``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tarfile import BLOCKSIZE, GNU_FORMAT, TarInfo
from typing import BinaryIO

import torch
import yaml

from sd_quant.checkpoints.accepted import CONFIG
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint, check_values, checkpoint_of, read_config
from sd_quant.checkpoints.nemo_state import betas_of, state_of, unused_state
from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path
from sd_quant.files.archive import open_members, whole_file
from sd_quant.files.checks import listing, renamed
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import Readable, lazy
from sd_quant.files.torch_weights import stored_tensors, write_tensors
from sd_quant.models.sdxl_nemo import noise_config, scheduler, with_noise
from sd_quant.names.authors import HARMLESS, told_family
from sd_quant.names.nemo import PREFIX
from sd_quant.names.sgm import PREFIXES, UNET, nemo_key

ARCHIVED_WEIGHTS = "model_weights.ckpt"


def open_nemo(path: Path, io: str = "nemo") -> NemoCheckpoint:
    """Opens an SDXL archive of NeMo, plain or gzipped, or the directory it was extracted to.

    ``io`` says whose names the UNet's inputs have, "nemo" or "diffusers".
    Raises ConfigError when ``path`` does not exist, ArtifactError when it is not a whole and harmless SDXL checkpoint.
    """
    members = open_members(path)
    for name in (CONFIG, ARCHIVED_WEIGHTS):
        if name not in members:
            raise ArtifactError(
                f"{path} holds no {name} but {listing(sorted(members)) or 'nothing'}; expected a whole single-GPU "
                "checkpoint, so fetch it again or merge its model-parallel parts"
            )
    state = renamed(path, stored_tensors(members[ARCHIVED_WEIGHTS]), _plain_key)
    checkpoint = checkpoint_of(path, read_config(members[CONFIG]), state)
    return replace(checkpoint, io=io, reopen=partial(open_nemo, path, io))


def open_sgm(path: Path, model_config: dict, io: str = "nemo") -> NemoCheckpoint:
    """Opens a safetensors file in Stability AI's layout, such as ``sd_xl_base_1.0.safetensors``.

    The file does not describe its architecture, so NeMo's ``model_config`` does; ``io`` as in ``open_nemo``. The empty
    tensors ``v_pred`` and ``ztsnr`` mark v-prediction and a terminal SNR of zero, as in ComfyUI.
    Raises ConfigError when ``path`` does not exist, ArtifactError when it is damaged or its tensors are not exactly
    those of that architecture.
    """
    stored = read_safetensors(whole_file(path))
    check_whole(path, stored)
    marked = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": "ztsnr" in stored}
    config = with_noise(model_config, noise_config(model_config) | marked) if "v_pred" in stored else model_config
    plain, own = betas_of(config), scheduler(config)
    stated = {
        "betas": (plain, own.betas), "alphas_cumprod": ((1 - plain).cumprod(0), own.alphas_cumprod),
        "scale_factor": (torch.tensor(config["scale_factor"]),),
    }  # fmt: skip
    left_out = {*stated, "v_pred", "ztsnr", *(name for name in stored if name.startswith(HARMLESS))}
    tensors = renamed(path, {name: each for name, each in stored.items() if name not in left_out}, nemo_key)
    unused = unused_state(torch.float32, config)  # the file lacks the noise levels
    advice = "give the folder of its diffusers pipeline if it is SDXL of another kind"
    checkpoint = checkpoint_of(path, config, unused | tensors, advice=advice)
    for name in stored.keys() & stated.keys():
        check_values(path, name, stored[name], "SDXL", *stated[name])
    return replace(checkpoint, io=io, reopen=partial(open_sgm, path, model_config, io))


def check_whole(path: Path, stored: Mapping[str, Readable]) -> None:
    """Raises ArtifactError for a single file of another family or kind, or of some networks of SDXL only."""
    told, first = told_family(stored), stored.get(f"{UNET}input_blocks.0.0.weight")
    lacking = [prefix for prefix in PREFIXES[:-1] if not any(name.startswith(prefix) for name in stored)]
    marks = [name for name in stored if name.startswith("edm_") or (name == "ztsnr" and "v_pred" not in stored)]
    if told not in (None, "an SDXL UNet"):
        why = f"is {told}, expected SDXL"
    elif first is not None and first.shape[1:2] == (9,):
        why = "is an inpainting UNet, with 9 input channels instead of SDXL's 4"
    elif told and lacking[-3:] == list(PREFIXES[1:-1]):
        why = "is UNet only: it needs text encoders and a VAE"
    elif lacking:
        why = f"is no whole SDXL: none of its tensors begins with {' or '.join(lacking)}"
    elif marks:
        why = f"has the mark {marks[0][:100]!r}, of which only v_pred, and ztsnr beside it, can be followed"
    else:
        return
    raise ArtifactError(f"{path} {why}; give a whole checkpoint of SDXL, or a diffusers folder with this one")


def write_nemo(path: Path, model_config: dict, modules: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> None:
    """Writes the four networks of ``sd_quant.models.sdxl_nemo.build_modules`` with weights in ``dtype``.

    Raises ResourceError when the disk is full.
    """
    write_archive(path, model_config, state_of({
        component: {name: lazy(parameter, dtype) for name, parameter in modules[component].named_parameters()}
        for component in PREFIX
    }, model_config))  # fmt: skip


def write_archive(
    path: Path, model_config: dict, state: Mapping[str, Readable], advance: Callable[[], object] = lambda: None
) -> None:
    """Writes a single-GPU archive, one tensor in memory at a time; the same input gives the same bytes.

    ``advance`` is called after each tensor. Raises ResourceError when the disk is full.
    """
    config = yaml.safe_dump(model_config, sort_keys=False).encode()
    with atomic_path(path) as temporary, temporary.open("w+b") as file:
        _write_member(file, CONFIG, lambda target: target.write(config))
        _write_member(file, ARCHIVED_WEIGHTS, lambda target: write_tensors(target, state, advance))
        file.write(bytes(2 * BLOCKSIZE))  # the end-of-archive mark


def _plain_key(key: str) -> str:
    """Returns ``key`` without the marks of torch.compile and of NeMo's O2 mixed precision."""
    return re.sub(r"^model\.module\.", "model.", key.replace("._orig_mod", ""))


def _write_member(file: BinaryIO, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file of the tar; its header, which holds the size, is written last."""
    header_at = file.tell()
    file.write(bytes(BLOCKSIZE))
    write(file)
    end = file.tell()
    header = TarInfo(f"./{name}")
    header.size = end - header_at - BLOCKSIZE
    file.write(bytes(-end % BLOCKSIZE))
    after = file.tell()
    file.seek(header_at)
    file.write(header.tobuf(GNU_FORMAT))  # one block, whatever the size
    file.seek(after)
