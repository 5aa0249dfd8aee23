"""Calibration statistics of the denoiser's layers: from the cache, a calibration here, or a file made elsewhere."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.collection import calibrate, origin
from sd_quant.config import Quantize, RecipeJob, sizes_of
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.places import input_path, output_path
from sd_quant.progress import duration
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages.generate import calibration_source_of

LOG = logging.getLogger(__name__)
LONG = 600  # seconds above which a calibration is announced with a warning


def statistics_of(
    checkpoint: Checkpoint,
    roles: dict[str, str],
    job: RecipeJob,
    checkpoint_sha256: str,
    prompts: list[str] | None = None,
    between_calls: Callable[[], object] = lambda: None,
) -> Statistics:
    """Collect or read the statistics of every layer that some recipe may quantize.

    One calibration serves all recipes, so linears that the family excludes are among them: a recipe may include them.
    ``roles`` are those of all the denoiser's layers. ``prompts`` stand in for those that the job names.
    ``between_calls`` is called before each call of the denoiser.
    """
    knobs = job.quantize
    names = [name for name, role in roles.items() if role != "excluded"]
    (width, height), *others = sizes = sizes_of(job.model)
    sampling = Sampling(
        knobs.n_steps, job.infer.scale, height, width, knobs.batch_size, knobs.seed, job.infer.negative_prompts(),
        source=calibration_source_of(job.model, job.infer), sizes=sizes if others else None,
    )  # fmt: skip
    network = empty_denoiser(checkpoint)
    watched = [name for name in roles if name in names or isinstance(network.get_submodule(name), nn.Linear)]
    if knobs.calibration is not None:
        contract = denoiser_part(checkpoint).contract
        besides = {name: network.get_submodule(name) for name in watched}
        needed = {name: besides.pop(name) for name in names}
        here = origin(checkpoint_sha256, watched, sampling, "cuda" if torch.cuda.is_available() else "cpu")
        return read_statistics(
            input_path(knobs.calibration), needed, contract, here, knobs.calib_size, checkpoint.family.GUIDES, besides
        )
    return calibrate(
        load_model(checkpoint),
        watched,
        job.calibration_prompts() if prompts is None else prompts,
        sampling,
        checkpoint_sha256=checkpoint_sha256,
        snapshots=knobs.snapshots,
        cache=output_path(job.cache.dir) / "statistics" if job.cache.dir else None,
        accelerator=knobs.accelerator,
        devices=knobs.devices,
        announce=partial(announce_calibration, knobs, sampling.steps_taken),
        between_calls=between_calls,
    )


def announce_calibration(knobs: Quantize, steps: int, device: str, prompts: int, seconds: float | None) -> None:
    """Log how many calls calibration takes and how long; where that is long, also how to shorten it."""
    calls = -(-prompts // knobs.batch_size) * steps
    about = (seconds or 0) * calls
    what = f"calibrating on {prompts} prompts: {calls} calls of the denoiser on {device}"
    what += f", about {duration(about)}" if about else ""
    if about <= LONG:
        LOG.info("%s", what)
        return
    LOG.warning(
        "%s; it takes less with fewer prompts or steps (calib_size=, quantize.n_steps=), on a GPU, or with statistics "
        "that were collected elsewhere (calibration=); Ctrl-C keeps what is done at %s prompts",
        what, ", ".join(str(size) for size in knobs.snapshots if size < prompts) or "none of the",
    )  # fmt: skip
