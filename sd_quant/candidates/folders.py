"""A denoiser's folder as diffusers saves it: in a pipeline's folder, or on its own."""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.checkpoints.diffusers_files import WEIGHTS, read_json, stored_weights
from sd_quant.checkpoints.tensors import StoredTensor
from sd_quant.errors import SdQuantError

DENOISERS = ("unet", "transformer")
CONFIG = "config.json"


def denoiser_folder(path: Path) -> Path | None:
    """The folder of the denoiser in ``path``, or ``path`` itself; None where there is none."""
    folders = [path / name for name in DENOISERS if (path / name / CONFIG).is_file()]
    return folders[0] if folders else path if (path / CONFIG).is_file() else None


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
