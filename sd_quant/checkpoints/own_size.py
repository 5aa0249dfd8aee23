"""For which size of images a checkpoint was made, as far as its own files say; no weight is read, nor torch imported.

diffusers writes the side of the denoiser's latents as ``sample_size``. NeMo's ``image_size`` is wrong in SDXL's own
config (64, where 128 is meant) and nothing reads it there, so it counts only where the autoencoder's ``resolution``
says the same, as in archives that were converted from a folder.
"""

import json
from pathlib import Path

import yaml

from sd_quant.checkpoints.accepted import INDEX
from sd_quant.errors import SdQuantError
from sd_quant.files.archive import is_gzipped, open_members, read_text
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.models import LATENT_FACTOR

DENOISERS = ("unet", "transformer")
SIDES = range(64, 4097, 64)  # in pixels, that images can have


def own_size(path: Path) -> tuple[int, int] | None:
    """Height and width in pixels; None where the files do not say, or nothing that can be.

    What is damaged says nothing: it is refused when it is opened as a checkpoint.
    """
    try:
        size = size_in_folder(path) if (path / INDEX).is_file() else size_in_nemo(path)
    except (SdQuantError, OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        return None
    return size if size is not None and all(type(side) is int and side in SIDES for side in size) else None


def size_in_folder(folder: Path) -> tuple[int, int] | None:
    """Of diffusers' pipelines: a number, or height and width."""
    (denoiser,) = (folder / name for name in DENOISERS if (folder / name).is_dir())
    size = json.loads(read_text(open_members(denoiser)["config.json"])).get("sample_size")
    height, width = size if isinstance(size, list) else (size, size)
    return None if size is None else (LATENT_FACTOR * height, LATENT_FACTOR * width)


def size_in_nemo(path: Path) -> tuple[int, int] | None:
    """Of archives that need not be unpacked, and of their folders."""
    if path.is_file() and (path.suffix != ".nemo" or is_gzipped(path)):
        return None
    config = load_yaml(read_text(open_members(path)["model_config.yaml"]))
    config = config.get("model", config)  # type: ignore[union-attr]
    side = LATENT_FACTOR * config["unet_config"]["image_size"]
    return (side, side) if side == config["first_stage_config"]["ddconfig"]["resolution"] else None
