"""Facts from the files of an unopened checkpoint: its kind, values of some knobs, its licence.

Importing this module does not import torch.
diffusers writes the side of the denoiser's latents as ``sample_size``, and two nulls for a component that a pipeline
was saved without, such as Stable Diffusion 3's T5. NeMo's ``image_size`` is wrong in SDXL's own config (64 instead of
128) and unused there, so it counts only where the autoencoder's ``resolution`` agrees, as in converted archives.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.files.archive import is_gzipped, is_tar, open_members, read_text, whole_file
from sd_quant.files.plain_yaml import load_yaml
from sd_quant.models import LATENT_FACTOR
from sd_quant.names.diffusers import DENOISERS
from sd_quant.text import one_line

INDEX = "model_index.json"  # of a diffusers pipeline
CONFIG = "model_config.yaml"  # of an archive of NeMo
ALSO_FILES = "sdxl"  # the family that is also read from single files, NeMo's and Stability AI's
SIDES = range(64, 4097, 64)  # in pixels, that images can have
CARD, LARGEST_CARD = "README.md", 100_000  # a model card, and the bytes of it that are read
LONGEST_LICENCE = 100  # characters
# Raised by damaged files. They state nothing here, and are refused when they are opened as a checkpoint.
DAMAGED = (
    SdQuantError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError,
)  # fmt: skip
STARTING: ContextVar[Path | None] = ContextVar("STARTING", default=None)  # the checkpoint of the job that starts


def check_kind(path: Path, family: str) -> None:
    """Raise ConfigError when ``path``, which exists, is no kind of file or folder that ``family`` can be read from."""
    also, advice, takes = (
        family == ALSO_FILES,
        "check the path",
        f"the folder of a diffusers pipeline, which has {INDEX}",
    )
    if path.is_dir():
        inside = (INDEX, CONFIG) if also else (INDEX,)
        found = "" if any((path / name).is_file() for name in inside) else f"a folder without {' and '.join(inside)}"
    elif not path.is_file():
        found = "a device or a pipe"
    else:
        read = also and (path.suffix.lower() in (".nemo", ".safetensors") or is_gzipped(path) or is_tar(path))
        found = "" if read else "a file of another kind" if also else "a file"
        advice = "make one with diffusers' from_single_file and save_pretrained"
    if not found:
        return
    if also:
        takes += ", a .nemo archive or its folder, or one .safetensors file in Stability AI's layout"
    if (path.parent / INDEX).is_file():
        advice = f"give the folder around it, {path.parent}"
    raise ConfigError(f"model.path is {path}, {found}, expected for {family} {takes}; {advice}")


@contextmanager
def starting(path: Path | None) -> Iterator[None]:
    """Make ``own_knob`` return, in the block, the values that the checkpoint at ``path`` states."""
    token = STARTING.set(path)
    try:
        yield
    finally:
        STARTING.reset(token)


def own_knob(knob: str, usual: Any) -> Any:
    """Return the value of the option ``knob`` that the checkpoint of ``starting`` states, else ``usual``."""
    if (path := STARTING.get()) is None:
        return usual
    if knob == "parts":
        return own_parts(path, usual)
    size = own_size(path)
    return usual if size is None else size[("height", "width").index(knob)]


def own_parts(path: Path, usual: Sequence[str]) -> list[str]:
    """Return the ``usual`` parts without those missing in model_index.json; all of them if there is no such file."""
    if not (path / INDEX).is_file():
        return list(usual)
    try:
        index = json.loads(read_text(open_members(path)[INDEX]))
        return [part for part in usual if index.get(part) not in (None, [None, None])]
    except DAMAGED:
        return list(usual)


def own_size(path: Path) -> tuple[int, int] | None:
    """Return height and width in pixels of the images that a checkpoint was made for, or None if not stated."""
    try:
        size = size_in_folder(path) if (path / INDEX).is_file() else size_in_nemo(path)
    except DAMAGED:
        return None
    return size if size is not None and all(type(side) is int and side in SIDES for side in size) else None


def size_in_folder(folder: Path) -> tuple[int, int] | None:
    """Return (height, width) in pixels, from ``sample_size`` in the config of a diffusers pipeline's denoiser."""
    (denoiser,) = (folder / name for name in DENOISERS if (folder / name).is_dir())
    size = json.loads(read_text(open_members(denoiser)["config.json"])).get("sample_size")
    height, width = size if isinstance(size, list) else (size, size)
    return None if size is None else (LATENT_FACTOR * height, LATENT_FACTOR * width)


def size_in_nemo(path: Path) -> tuple[int, int] | None:
    """Return (height, width) in pixels, from an uncompressed NeMo archive or a folder of its files; else None."""
    if path.is_file() and (path.suffix.lower() != ".nemo" or is_gzipped(path)):
        return None
    config = load_yaml(read_text(open_members(path)[CONFIG]))
    config = config.get("model", config)  # type: ignore[union-attr]
    side = LATENT_FACTOR * config["unet_config"]["image_size"]
    return (side, side) if side == config["first_stage_config"]["ddconfig"]["resolution"] else None


def licence_of(path: Path) -> str | None:
    """Return the licence in a folder's model card or in a single file's metadata, or None.

    A card is a README.md that begins with YAML between lines of dashes, as on Hugging Face. Metadata follow ModelSpec
    (``modelspec.license``). NeMo's archives have none.
    """
    from sd_quant.files.safetensors import read_header  # which imports torch

    named = None
    if (path / CARD).is_file():
        file = whole_file(path / CARD)
        with suppress(*DAMAGED):
            start = bytes(file.read(0, min(file.size, LARGEST_CARD)))
            card = load_yaml(re.match(rb"---\r?\n(.*?)\r?\n---", start, re.DOTALL)[1])  # type: ignore[index]
            named = card.get("license_name") or card.get("license")  # type: ignore[union-attr]
    elif path.suffix.lower() == ".safetensors":
        named = read_header(whole_file(path))[1].get("modelspec.license")
    return one_line(named, LONGEST_LICENCE) if isinstance(named, str) else None
