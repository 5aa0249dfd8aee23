"""Quantize a checkpoint: ONNX files, engines, images and measurements."""

import logging
from pathlib import Path

from sd_quant.cli import Command, importing
from sd_quant.config import QuantizeJob, check_heeded
from sd_quant.stages.job_folder import DONE_BEFORE, check_no_other_run, closing_words, done_before

LOG = logging.getLogger(__name__)


def task(job: QuantizeJob, directory: Path) -> float | None:
    """Do the job, unless its folder holds its result. Return the mean PSNR in dB, which Hydra's sweepers read."""
    if (record := done_before(job, directory)) is not None:  # before the imports that the work itself needs
        LOG.info(DONE_BEFORE)
        return closing_words(record, directory)
    with importing():
        from sd_quant.stages.quantize import quantize

    return quantize(job, directory)


def check_before_run(job: QuantizeJob, directory: Path, given: list[str]) -> None:
    """Raise ConfigError for a knob without effect, or another finished run in ``directory``."""
    check_heeded(job, given)
    check_no_other_run(job, directory)


def time_together(directory: Path) -> None:
    """Time the engines of a sweep's jobs together, after the last job."""
    with importing():
        from sd_quant.stages.time_sweep import time_sweep

    time_sweep(directory)


main = Command("quantize", QuantizeJob, task, check_before_run, time_together)
