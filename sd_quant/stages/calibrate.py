"""Calibration statistics: from the cache, from calibrating here, or (the denoiser's alone) from a given file."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sd_quant.calibration.call_tables import Row
from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.collection import Pass, calibrate, fabric_for, origin
from sd_quant.calibration.overflow import too_large
from sd_quant.calibration.parts import DECODER, calibrate_parts
from sd_quant.config import Quantize, RecipeJob, prompts_of
from sd_quant.inference.loading import load_model
from sd_quant.models.checkpoint import Checkpoint, contracts_of, denoiser_part, empty_denoiser, roles_of_part
from sd_quant.places import input_path, output_path
from sd_quant.quantization.statistics import Statistics, highest
from sd_quant.stages.generate import calibration_sampling
from sd_quant.stages.load import Loaded
from sd_quant.text import counted

LOG = logging.getLogger(__name__)


def statistics_of(
    loaded: Loaded, job: RecipeJob, checkpoint_sha256: str, rows: Sequence[Row] | None = None
) -> Statistics:
    """Collect or read the statistics of every layer that any recipe may quantize; warn of overflow in fp16.

    One calibration serves all recipes, so it covers all denoisers, also their linears excluded by default. Other parts
    are calibrated if their recipes need layer inputs. ``rows``: prompts (rows of a call table) in place of the job's.
    """
    checkpoint, roles, knobs = loaded.checkpoint, loaded.roles, job.quantize
    names = [name for name, role in roles.items() if role != "excluded"]
    if rows is None:
        rows = job.calibration_rows() if knobs.calibration is None else []
    sampling = calibration_sampling(job.model, job.infer, knobs, rows)
    watched = watched_layers(checkpoint, roles)
    if knobs.calibration is not None:
        network, contract = empty_denoiser(checkpoint), denoiser_part(checkpoint).contract
        besides = {name: network.get_submodule(name) for name in watched}
        needed = {name: besides.pop(name) for name in names}
        here = origin(checkpoint_sha256, watched, sampling, "cuda" if torch.cuda.is_available() else "cpu")
        return read_statistics(
            input_path(knobs.calibration), needed, contract, here, knobs.calib_size, checkpoint.family.GUIDES, besides
        )  # fmt: skip
    model, latents = load_model(checkpoint), dict[int, torch.Tensor]()
    calibrated = [part for part, recipe in loaded.part_recipes.items() if recipe.needs_inputs]
    heard: dict[str, Any] = {"on_latent": latents.__setitem__} if DECODER in calibrated else {}  # one a prompt
    prompts = prompts_of(rows)
    cache = output_path(job.cache.dir) / "statistics" if job.cache.dir else None
    for part, other in loaded.others.items():
        watched += [f"{part}:{name}" for name in watched_layers(other.checkpoint, other.roles)]
    wanted, fabric = Pass(model, watched, prompts, sampling), fabric_for(knobs.accelerator, knobs.devices)
    kept: dict[str, Any] = {"checkpoint_sha256": checkpoint_sha256, "cache": cache}
    announce = partial(announce_calibration, knobs, sampling.steps_taken)
    statistics = calibrate(wanted, fabric, snapshots=knobs.snapshots, announce=announce, **kept, **heard)
    if calibrated:
        parts = {}
        for part in calibrated:
            roles = roles_of_part(checkpoint, part)
            layers = [name for name, role in roles.items() if role != "excluded"]
            parts[part] = Pass(model, layers, prompts, sampling)
        statistics.parts |= calibrate_parts(parts, fabric_for(knobs.accelerator), latents=latents, **kept)
        statistics.peaks = highest([statistics.peaks, *(each.peaks for each in statistics.parts.values())])
    if statistics.peaks and (warning := too_large(statistics.peaks, contracts_of(checkpoint))):
        LOG.warning("%s", warning)
    return statistics


def watched_layers(checkpoint: Checkpoint, roles: Mapping[str, str]) -> list[str]:
    """Return the denoiser's layers to calibrate: all linears, and convolutions that are not excluded."""
    network = empty_denoiser(checkpoint)
    return [name for name, role in roles.items()
            if role != "excluded" or isinstance(network.get_submodule(name), nn.Linear)]  # fmt: skip


def announce_calibration(knobs: Quantize, steps: int, device: str, prompts: int) -> None:
    """Log the calls of a calibration; how long they take is what the progress bar estimates."""
    calls = -(-prompts // knobs.batch_size) * steps
    LOG.info("calibrating on %s: %s of the denoiser on %s", counted(prompts, "prompt"), counted(calls, "call"), device)
