"""Read start noise from a .pt, .npy or .safetensors file without executing code in it.

The noise is the ``latents`` argument of diffusers' pipelines: normally distributed with standard deviation 1; the
pipeline multiplies it by its sampler's first noise level.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import open_regular
from sd_quant.files.torch_weights import check_pickle


def from_numpy(path: Path) -> Tensor:
    array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: else numpy allocates the size the header claims
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def from_safetensors(path: Path) -> Tensor:
    """Return the only tensor of the file. Raises ValueError when the file has no tensor or several."""
    [tensor] = safetensors.torch.load(path.read_bytes()).values()
    return tensor


def from_torch(path: Path) -> Any:
    """Load a torch.save file. Raises ValueError for records larger than the file, or a pickle that would take hours."""
    with ZipFile(path) as archive:
        if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        for name in archive.namelist():
            if name.lower().endswith(".pkl"):  # torch looks for names in either case
                check_pickle(archive.read(name))
    return torch.load(path, map_location="cpu", weights_only=True)


FILE_READERS: dict[str, Callable[[Path], Any]] = {
    ".pt": from_torch, ".npy": from_numpy, ".safetensors": from_safetensors,
}  # fmt: skip


def read_latents(path: Path, numbers: set[int], rows: int, columns: int) -> Tensor:
    """Read start noise from a file, fp32 [N, C, rows, columns]: N images, one of ``numbers``, with C channels.

    Raises ConfigError for an unknown file extension or another shape, and ArtifactError for a damaged file or one
    that holds something other than one tensor of finite floating-point numbers.
    """
    if path.suffix.lower() not in FILE_READERS:
        raise ConfigError(f"infer.latents is {path}, expected a name that ends with {', '.join(FILE_READERS)}")
    try:
        open_regular(path).close()  # refuses a pipe, for which the readers would wait
        latents = FILE_READERS[path.suffix.lower()](path)
    except ArtifactError:
        raise
    except Exception as error:  # the bytes decide which; torch's text, which advises to be unsafe, is hidden
        raise ArtifactError(
            f"infer.latents: {path} cannot be read as one tensor ({type(error).__name__}); save it again, without "
            "anything else in the file"
        ) from None
    if not (isinstance(latents, Tensor) and latents.is_floating_point()):
        what = f"numbers of {latents.dtype}" if isinstance(latents, Tensor) else f"a {type(latents).__name__}"
        raise ArtifactError(f"infer.latents: {path} holds {what}, expected one tensor of fp32 or fp16; save it as that")
    shape = list(latents.shape)
    if len(shape) != 4 or shape[0] not in numbers or shape[2:] != [rows, columns]:  # before anything is computed
        expected = f"[{' or '.join(map(str, sorted(numbers)))}, channels, {rows}, {columns}]"
        raise ConfigError(
            f"infer.latents: {path} holds a tensor {shape}, expected {expected} for as many images of "
            "infer.height and infer.width; make it for these, or change the knobs"
        )
    latents = latents.detach().to_dense().float()
    if not latents.isfinite().all():
        raise ArtifactError(f"infer.latents: {path} holds NaN or infinity; make the noise again")
    return latents


def digest_of(latents: Tensor) -> str:
    """Return the SHA-256 of the latents in fp32, which does not depend on the file format."""
    return hashlib.sha256(latents.numpy().astype("<f4").tobytes()).hexdigest()
