"""Opens a checkpoint with the reader of its kind, which its path and the family tell."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sd_quant.checkpoints.accepted import INDEX, check_kind
from sd_quant.checkpoints.controlnet import with_controlnets
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.checkpoints.lora import fused
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.checkpoints.single_file import open_single_file
from sd_quant.checkpoints.vae import with_vae
from sd_quant.errors import ConfigError
from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.family import family_named


def open_checkpoint(
    path: Path,
    family: str,
    *,
    io: str | None = None,
    max_sequence_length: int | None = None,
    parts: Sequence[str] | None = None,
    loras: Sequence[tuple] = (),
    encodes: bool = False,
    dtypes: Dtypes = None,
    pipeline: str | None = None,
    vae: Path | None = None,
    controlnets: Sequence[tuple[Path, float]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens a checkpoint of ``family``; reads no weight.

    ``path`` is the folder of a diffusers pipeline; of SDXL also a ``.nemo``, the folder that one was extracted to, or a
    single file in Stability AI's layout.
    ``io``: whose names the denoiser's inputs have, "nemo" or "diffusers"; None for those of the kind of file.
    ``max_sequence_length``: the longest text of a T5 in tokens; None for the family's default.
    ``parts``: names of the parts that are used; None for all. An optional network is left out unless it is among them.
    ``loras``: files of adapters to fuse into the weights, and their strengths.
    ``encodes``: whether the autoencoder's encoder is a part.
    ``dtypes``: of exported weights, for all parts or by part; None for the family's.
    ``pipeline``: who makes images of SDXL's files, "nemo" or "diffusers"; None for NeMo of its own.
    ``arguments``: further ones of the pipeline's call.
    ``vae``: a folder or a file of the autoencoder that takes the place of the checkpoint's.
    ``controlnets``: folders of ControlNets beside its networks, with the scales of their outputs.
    Raises ConfigError for another kind of file or other ``parts`` than it has, and what the readers raise.
    """
    if max_sequence_length is not None and family_named(family).TOKENS is None:
        raise ConfigError(
            f"model.max_sequence_length is {max_sequence_length}, expected null, because {family} has no T5 to read "
            "that much"
        )
    opened = _opened(path, family, io, max_sequence_length, parts, pipeline)
    if parts is not None and sorted(parts) != sorted(opened.parts()):
        raise ConfigError(
            f"model.parts is [{','.join(parts)}], expected [{','.join(opened.parts())}], the networks that {path} has"
        )
    if vae is not None:
        opened = with_vae(opened, vae)
    if loras:
        opened = fused(opened, loras, family)
    if controlnets:
        opened = with_controlnets(opened, controlnets)
    again = partial(
        open_checkpoint, path, family, io=io, max_sequence_length=max_sequence_length, parts=parts, loras=loras,
        encodes=encodes, dtypes=dtypes, pipeline=pipeline, vae=vae, controlnets=controlnets, arguments=arguments,
    )  # fmt: skip
    return replace(opened, encodes=encodes, dtypes=dtypes, arguments=dict(arguments or {}), reopen=again)


def _opened(
    path: Path, family: str, io: str | None, tokens: int | None, parts: Sequence[str] | None, pipeline: str | None
) -> DiffusersCheckpoint | NemoCheckpoint:
    check_kind(path, family)
    if (path / INDEX).is_file():
        if pipeline == "nemo":
            raise ConfigError(
                f"model.pipeline is nemo, expected null, because {path} is a folder, which diffusers makes images of; "
                "use model=sdxl, or make a .nemo archive of it with sd-quant convert"
            )
        return open_pipeline(path, family, tokens, io or "diffusers", parts)
    if path.suffix.lower() == ".safetensors":
        return open_single_file(path, io=io, pipeline=pipeline or "diffusers")
    return open_nemo(path, io, pipeline or "nemo")
