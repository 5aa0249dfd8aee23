"""Open a checkpoint with the reader for its kind of file, chosen by path and family."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.checkpoints.lora import fused
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.other_networks import Opened, with_controlnets, with_vae
from sd_quant.checkpoints.single_file import open_single_file
from sd_quant.checkpoints.unopened import INDEX, check_kind
from sd_quant.errors import ConfigError
from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.family import family_named


class Options(TypedDict, total=False):
    """Keyword arguments of ``open_checkpoint``."""

    io: str | None  # naming of the denoiser's inputs, "nemo" or "diffusers"; None: by the kind of file
    max_sequence_length: int | None  # longest text of a T5 in tokens; None: the family's
    parts: Sequence[str] | None  # names of all parts to use; None: all. An optional network not named is left out
    loras: Sequence[tuple]  # (file, strength) of each adapter, fused into the weights
    encodes: bool  # whether the autoencoder's encoder is a part
    dtypes: Dtypes  # of exported weights, for all parts or by part; None: the family's
    pipeline: str | None  # what makes SDXL's images, "nemo" or "diffusers"; None: NeMo for NeMo's files
    vae: Path | None  # folder or file of an autoencoder that replaces the checkpoint's
    controlnets: Sequence[tuple[Path, float]]  # folders of ControlNets, and the scales of their outputs
    arguments: Mapping[str, Any] | None  # additional arguments of the pipeline's call


def open_checkpoint(path: Path, family: str, **options: Unpack[Options]) -> Checkpoint:
    """Open a checkpoint of ``family``; reads no weight.

    ``path`` is a diffusers pipeline folder; for SDXL also a ``.nemo`` archive, the folder it was extracted to, or a
    single file in Stability AI's layout.
    Raises ConfigError for another kind of file or if ``parts`` are not those of the file, ArtifactError for damage.
    """
    tokens, parts = options.get("max_sequence_length"), options.get("parts")
    if tokens is not None and family_named(family).TOKENS is None:
        raise ConfigError(
            f"model.max_sequence_length is {tokens}, expected null, because {family} has no T5 to read that much"
        )
    check_kind(path, family)
    opened = _opened(path, family, options)
    if parts is not None and sorted(parts) != sorted(opened.parts()):
        raise ConfigError(
            f"model.parts is [{','.join(parts)}], expected [{','.join(opened.parts())}], the networks that {path} has"
        )
    if vae := options.get("vae"):
        opened = with_vae(opened, vae)
    if loras := options.get("loras"):
        opened = fused(opened, loras, family)
    if controlnets := options.get("controlnets"):
        opened = with_controlnets(opened, controlnets)
    return replace(
        opened, encodes=options.get("encodes", False), dtypes=options.get("dtypes"),
        arguments=dict(options.get("arguments") or {}), reopen=partial(open_checkpoint, path, family, **options),
    )  # fmt: skip


def _opened(path: Path, family: str, options: Options) -> Opened:
    io, pipeline = options.get("io"), options.get("pipeline")
    if (path / INDEX).is_file():
        if pipeline == "nemo":
            raise ConfigError(
                f"model.pipeline is nemo, expected null, because {path} is a folder, which diffusers makes images of; "
                "use model=sdxl, or make a .nemo archive of it with sd-quant convert"
            )
        tokens = options.get("max_sequence_length")
        return open_pipeline(path, family, tokens, io or "diffusers", options.get("parts"))
    if path.suffix.lower() == ".safetensors":
        return open_single_file(path, io=io, pipeline=pipeline or "diffusers")
    return open_nemo(path, io, pipeline or "nemo")
