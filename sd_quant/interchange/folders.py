"""A denoiser's folder as diffusers saves it: in a pipeline's folder, or on its own."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.files.folders import WEIGHTS, read_json, stored_weights
from sd_quant.files.tensors import LazyTensor, StoredTensor
from sd_quant.models.checkpoint import Checkpoint, denoiser_part

DENOISERS = ("unet", "transformer")
CONFIG = "config.json"


def denoiser_folder(path: Path) -> Path | None:
    """The folder of the denoiser in ``path``, or ``path`` itself; None where there is none."""
    folders = [path / name for name in DENOISERS if (path / name / CONFIG).is_file()]
    return folders[0] if folders else path if (path / CONFIG).is_file() else None


def holds(path: Path, name: str) -> bool:
    """Whether a file of this name lies beside a denoiser's weights."""
    try:
        folder = denoiser_folder(path) if path.is_dir() else None
        return folder is not None and (folder / name).is_file()
    except OSError:
        return False


def quantization_config(path: Path) -> Mapping[str, object] | None:
    """``quantization_config`` of the denoiser's config; None where there is no such object, or no config at all."""
    try:
        folder = denoiser_folder(path) if path.is_dir() else None
        found = read_json(folder, CONFIG).get("quantization_config") if folder is not None else None
    except (SdQuantError, OSError):
        return None
    return found if isinstance(found, Mapping) else None


def quantized_by(path: Path, method: str) -> bool:
    """Whether ``path`` is a folder whose config says that ``method`` has quantized it."""
    return (quantization_config(path) or {}).get("quant_method") == method


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The denoiser's tensors by the names in its files. Raises what ``stored_weights`` raises."""
    return stored_weights(denoiser_folder(path), WEIGHTS["diffusers"])


def decoded(
    path: Path,
    layer: str,
    shape: tuple[int, ...],
    decode: Callable[[], Tensor],
    dtype: torch.dtype = torch.float32,
) -> LazyTensor:
    """The weight of a ``layer``, of that ``shape`` and ``dtype``, which ``decode`` makes each time that it is read.

    Reading it raises ArtifactError where a number is NaN or infinite.
    """

    def read() -> Tensor:
        weight = decode()
        if not torch.isfinite(weight).all():
            raise ArtifactError(
                f"{path}: the weight of {layer} has NaN or infinite numbers, expected finite ones; fetch it again"
            )
        return weight

    return LazyTensor(shape, dtype, read)


def by_diffusers(
    path: Path, checkpoint: Checkpoint, package: str, **environment: str
) -> Callable[[], nn.Module] | None:
    """Opens the denoiser as diffusers and ``package`` do, in fp32; None where that is not installed.

    The class is the one that the pipeline's family has, whatever the config names. ``environment`` is what ``package``
    reads when it is imported, where it is not set.
    """
    if find_spec(package) is None:
        return None

    def load() -> nn.Module:
        import diffusers

        for name, value in environment.items():
            os.environ.setdefault(name, value)
        folder = denoiser_folder(path)
        kind = checkpoint.family.NETWORKS[denoiser_part(checkpoint).component]
        found = read_json(folder, CONFIG).get("_class_name")
        if found != kind:
            raise ArtifactError(f"{folder / CONFIG} is of a {str(found)[:100]!r}, expected {kind}; give that one's")
        network = getattr(diffusers, kind).from_pretrained(
            folder, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        return network.eval()

    return load
