"""Open and write SDXL as a ``.nemo`` archive.

An archive is a tar of two files, ``model_config.yaml`` and ``model_weights.ckpt``, which torch.save wrote. Opening
reads the config and the directory of the weights, and compares every key and shape with the networks that the config
describes. It reads no weight.
Alternative not taken: NeMo's SaveRestoreConnector. It extracts the archive, unpickles, and instantiates ``target``.
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

from sd_quant.checkpoints.nemo_networks import NemoCheckpoint, checkpoint_of, read_config, state_of
from sd_quant.checkpoints.unopened import CONFIG
from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path
from sd_quant.files.archive import open_members
from sd_quant.files.checks import listing, renamed
from sd_quant.files.tensors import Readable, lazy
from sd_quant.files.torch_weights import stored_tensors, write_tensors
from sd_quant.models.sdxl_nemo import PIPELINES
from sd_quant.names.nemo import PREFIX

ARCHIVED_WEIGHTS = "model_weights.ckpt"


def open_nemo(path: Path, io: str | None = None, pipeline: str = "nemo") -> NemoCheckpoint:
    """Open a NeMo archive of SDXL, plain or gzipped, or the folder of its files; options as in ``kinds.Options``.

    Raises ConfigError for a missing ``path``, ArtifactError for anything but a whole and harmless SDXL checkpoint.
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
    reopen = partial(open_nemo, path, io, pipeline)
    return replace(checkpoint, io=io or "nemo", pipeline=PIPELINES[pipeline], reopen=reopen)


def write_nemo(path: Path, model_config: dict, modules: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> None:
    """Write ``modules``, made by ``build_modules``, with weights in ``dtype``. Raises ResourceError for a full disk."""
    write_archive(path, model_config, state_of({
        component: {name: lazy(parameter, dtype) for name, parameter in modules[component].named_parameters()}
        for component in PREFIX
    }, model_config))  # fmt: skip


def write_archive(
    path: Path, model_config: dict, state: Mapping[str, Readable], advance: Callable[[], object] = lambda: None
) -> None:
    """Write an archive tensor by tensor, the same bytes for the same input. Raises ResourceError for a full disk."""
    config = yaml.safe_dump(model_config, sort_keys=False).encode()
    with atomic_path(path) as temporary, temporary.open("w+b") as file:
        _write_member(file, CONFIG, lambda target: target.write(config))
        _write_member(file, ARCHIVED_WEIGHTS, lambda target: write_tensors(target, state, advance))
        file.write(bytes(2 * BLOCKSIZE))  # the end-of-archive mark


def _plain_key(key: str) -> str:
    """Return ``key`` without the parts that torch.compile and NeMo's O2 mixed precision insert."""
    return re.sub(r"^model\.module\.", "model.", key.replace("._orig_mod", ""))


def _write_member(file: BinaryIO, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file of the tar; its header, which holds the size, is written last."""
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
