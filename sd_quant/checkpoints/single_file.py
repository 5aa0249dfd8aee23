"""SDXL as one safetensors file in Stability AI's layout, such as ``sd_xl_base_1.0.safetensors``, read and written.

Such files are opened in diffusers, ComfyUI and the like, so images are made as by diffusers' ``from_single_file``.
A file does not describe its networks: they are SDXL base's, or those of the config that ``convert`` put in its
metadata. Its prediction type is given by tensors that ComfyUI reads as marks, else by metadata (modelspec), else it is
epsilon. Alternative not taken: ``from_single_file`` itself. It fetches configs from a hub, and drops unknown tensors
silently.
"""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sd_quant.checkpoints.nemo_networks import (
    NemoCheckpoint,
    betas_of,
    check_described,
    check_values,
    checkpoint_of,
    config_in,
    sdxl_base_config,
    unused_state,
)
from sd_quant.checkpoints.unopened import CONFIG
from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import renamed
from sd_quant.files.safetensors import FORMAT, read_header
from sd_quant.files.tensors import Readable, lazy
from sd_quant.models.sdxl_nemo import PIPELINES, noise_config, scheduler, with_noise
from sd_quant.names.authors import HARMLESS, MARKS, sampling_marks, told_family
from sd_quant.names.nemo import POSITION_IDS, SIGMAS
from sd_quant.names.sgm import PREFIXES, UNET, nemo_key, sgm_key

LOG = logging.getLogger(__name__)
PREDICTION, ARCHITECTURE = "modelspec.prediction_type", "modelspec.architecture"  # entries of metadata
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}  # that the first states
DESCRIPTION = f"sd_quant.{CONFIG}"  # an entry of metadata in files that ``convert`` writes
ZERO_SNR = "rescale_betas_zero_snr"
NO_PART = {  # of SDXL: what to do with tensors whose names begin so
    "cond_stage_model.": "the text encoder of Stable Diffusion 1 or 2, which a merge left, so take it out",
    "control_model.": "a ControlNet, so take it out",
    "lora_": "a LoRA, so give it to model.loras as a file of its own",
    "text_encoder": "text encoders by diffusers' names, so give the diffusers folder",
    "vae.": "an autoencoder by diffusers' names, so give it as model.vae in a file of its own",
}


def open_single_file(
    path: Path, model_config: dict | None = None, io: str | None = None, pipeline: str = "diffusers"
) -> NemoCheckpoint:
    """Open the file; reads no weight. ``model_config`` is NeMo's, by default the file's own or else SDXL base's.

    Tensors mark the prediction type, as in ComfyUI: ``v_pred`` v-prediction, ``ztsnr`` a terminal SNR of zero.
    Raises ConfigError for a missing ``path``, ArtifactError for damage and other tensors than the networks have.
    """
    stored, metadata = read_header(whole_file(path))
    marks = sampling_marks(stored)
    check_whole(path, stored, marks)
    config = model_config or sdxl_base_config()
    if model_config is None and DESCRIPTION in metadata:
        config = config_in(f"{path}: its {DESCRIPTION}", str(metadata[DESCRIPTION]).encode())
    check_described(path, config)
    with refusing(f"{path}: its configuration does not say what it predicts", KeyError):
        config = with_noise(config, noise_config(config) | declared(path, marks, metadata))
    plain, own = betas_of(config), scheduler(config)
    stated = {
        "betas": (plain, own.betas), "alphas_cumprod": ((1 - plain).cumprod(0), own.alphas_cumprod),
        "scale_factor": (torch.tensor(config["scale_factor"]),),
    }  # fmt: skip
    left_out = [name for name in stored if name.startswith(HARMLESS)]
    if left_out:
        LOG.info("%s: %d tensors of training are left out, such as %s", path, len(left_out), left_out[0][:100])
    used = stored.keys() - {*stated, *left_out, *MARKS, *(UNET + mark for mark in MARKS)}
    tensors = renamed(path, {name: stored[name] for name in stored if name in used}, nemo_key)
    unused = unused_state(torch.float32, config)  # the file lacks the noise levels
    found = (f"{name}* are {what}" for name, what in NO_PART.items() if any(each.startswith(name) for each in used))
    advice = "; ".join(found) or "give the folder of its diffusers pipeline if it is SDXL of another kind"
    checkpoint = checkpoint_of(path, config, unused | tensors, advice=advice)
    for name in stored.keys() & stated.keys():
        check_values(path, name, stored[name], "SDXL", *stated[name])
    reopen = partial(open_single_file, path, model_config, io, pipeline)
    return replace(checkpoint, io=io or pipeline, pipeline=PIPELINES[pipeline], reopen=reopen)


def check_whole(path: Path, stored: Mapping[str, Readable], marks: Collection[str]) -> None:
    """Raise ArtifactError for a file of another family, without some network of SDXL, or with unsupported ``marks``."""
    told, first = told_family(stored), stored.get(f"{UNET}input_blocks.0.0.weight")
    lacking = [prefix for prefix in PREFIXES[:-1] if not any(name.startswith(prefix) for name in stored)]
    if told not in (None, "an SDXL UNet"):
        why = f"is {told}, expected SDXL"
    elif first is not None and first.shape[1:2] == (9,):
        why = "is an inpainting UNet, with 9 input channels instead of SDXL's 4"
    elif told and lacking[-3:] == list(PREFIXES[1:-1]):
        why = "is UNet only: it needs text encoders and a VAE"
    elif lacking:
        why = f"is no whole SDXL: none of its tensors begins with {' or '.join(lacking)}"
    elif marks and set(marks) not in ({"v_pred", "ztsnr"}, {"v_pred"}):
        why = f"has the mark {' and '.join(marks)}, which is not followed, expected none, v_pred and ztsnr or v_pred"
    else:
        return
    raise ArtifactError(f"{path} {why}; give a whole checkpoint of SDXL, or a diffusers folder with this one")


def declared(path: Path, marks: Collection[str], metadata: Mapping[str, str]) -> dict:
    """Return a file's prediction type as a scheduler's config entries: by ``marks`` if present, else by metadata."""
    if "v_pred" in marks:
        return {"prediction_type": "v_prediction", ZERO_SNR: "ztsnr" in marks}
    if (stated := metadata.get(PREDICTION)) is None:
        return {}
    if stated not in PREDICTIONS:
        raise ArtifactError(
            f"{path}: {PREDICTION} in its metadata is {ascii(stated)[:100]}, expected {' or '.join(PREDICTIONS)}; "
            "correct it, or give a diffusers folder whose scheduler says what it predicts"
        )
    return {"prediction_type": PREDICTIONS[stated]}


def single_file_of(checkpoint: NemoCheckpoint) -> tuple[dict[str, Readable], dict[str, str]]:
    """Return a single file's tensors and metadata. Raises ArtifactError for noise levels that it cannot state."""
    noise, usual = noise_config(checkpoint.model_config), noise_config()
    said = next(name for name, prediction in PREDICTIONS.items() if prediction == noise["prediction_type"])
    others = [f"{name} {noise[name]}" for name in usual if name not in ("prediction_type", ZERO_SNR)
              and noise[name] != usual[name]]  # fmt: skip
    others += ["a terminal SNR of zero without v-prediction"] if noise[ZERO_SNR] and said != "v" else []
    if others:
        raise ArtifactError(
            f"{checkpoint.path} has {others[0]}, which no single file can state; give a folder as the target"
        )
    marks = {"v_pred": said == "v", "ztsnr": noise[ZERO_SNR]}
    state: dict[str, Readable] = {POSITION_IDS: lazy(torch.arange(checkpoint.clip1.context)[None])}
    state |= {key: tensor for key, tensor in checkpoint.state().items() if key != SIGMAS}
    tensors = {sgm_key(key): tensor for key, tensor in state.items()}
    tensors |= {mark: lazy(torch.ones(1)) for mark, is_so in marks.items() if is_so}
    metadata = {ARCHITECTURE: "stable-diffusion-xl-v1-base", PREDICTION: said}
    return tensors, FORMAT | metadata | {DESCRIPTION: json.dumps(checkpoint.model_config)}
