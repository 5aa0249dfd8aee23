"""Statistics of the denoiser's layers: from the cache, from a calibration here, or from a file made elsewhere."""

import logging

import torch

from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.collection import calibrate, origin
from sd_quant.config import QuantizeJob
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.flops import operations, operations_a_second
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser, samples_per_image
from sd_quant.models.parts import axes
from sd_quant.places import input_path, output_path
from sd_quant.progress import duration
from sd_quant.quantization.statistics import Statistics

LOG = logging.getLogger(__name__)


def statistics_of(
    checkpoint: Checkpoint,
    roles: dict[str, str],
    job: QuantizeJob,
    checkpoint_sha256: str,
    prompts: list[str] | None = None,
) -> Statistics:
    """Statistics of every layer that some level may quantize; ``roles`` are those of all the denoiser's layers.

    They are of ``prompts``, or of those that the job names.
    """
    knobs = job.quantize
    names = [name for name, role in roles.items() if role != "excluded"]
    sampling = Sampling(
        knobs.n_steps, job.infer.scale, job.model.height, job.model.width, knobs.batch_size, knobs.seed,
        job.infer.negative_prompts(),
    )  # fmt: skip
    if knobs.calibration is not None:
        network, contract = empty_denoiser(checkpoint), denoiser_part(checkpoint).contract
        layers = {name: network.get_submodule(name) for name in names}
        here = origin(checkpoint_sha256, names, sampling, "cuda" if torch.cuda.is_available() else "cpu")
        return read_statistics(
            input_path(knobs.calibration), layers, contract, here, knobs.calib_size, checkpoint.family.GUIDES
        )
    return calibrate(
        load_model(checkpoint),
        names,
        job.calibration_prompts() if prompts is None else prompts,
        sampling,
        checkpoint_sha256=checkpoint_sha256,
        snapshots=knobs.snapshots,
        cache=output_path(job.cache.dir) / "statistics" if job.cache.dir else None,
        accelerator=knobs.accelerator,
        devices=knobs.devices,
        announce=lambda device, prompts: announce_calibration(checkpoint, job, device, prompts),
    )


def announce_calibration(checkpoint: Checkpoint, job: QuantizeJob, device: str, prompts: int) -> None:
    """Log how much there is to compute, and on a CPU how long it will take."""
    calls, samples = prompts * job.quantize.n_steps, samples_per_image(checkpoint, job.infer.scale)
    if device != "cpu":
        LOG.info("calibrating on %d prompts: %d samples of the denoiser on %s", prompts, calls * samples, device)
        return
    part = denoiser_part(checkpoint)
    shapes = part.contract.shapes(**axes(samples, job.model.width, job.model.height))
    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):  # what a network makes for itself
        total, _ = operations(part.wrap(empty_denoiser(checkpoint)), inputs)
    seconds = calls * total / operations_a_second()
    LOG.info(
        "calibrating on %d prompts: %d calls of the denoiser with %.4g GFLOP each, about %s on this processor%s",
        prompts, calls, total / 1e9, duration(seconds),
        "; a GPU or calibration=<existing statistics> saves it" if seconds > 1800 else "",
    )  # fmt: skip
