"""Quantize a checkpoint: ONNX files, engines, images and measurements."""

import logging
from pathlib import Path

from sd_quant.cli import Command, importing
from sd_quant.config import QuantizeJob, check_heeded
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.stages.job_folder import DONE_BEFORE, check_no_other_run, closing_words, done_before, in_sweep

LOG = logging.getLogger(__name__)


def task(job: QuantizeJob, directory: Path) -> float | None:
    """Do the job, unless its folder holds its result. Return the mean PSNR in dB, which Hydra's sweepers read."""
    if job.judge.candidates and not in_sweep(directory):
        raise ConfigError(
            "candidates are judged beside the recipes of a sweep, and this is a single run; add -m, or give its folder "
            "to judge as one of the candidates"
        )
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


def check_before_sweep(job: QuantizeJob) -> None:
    """Raise SdQuantError for a third-party checkpoint that cannot be read, before hours of other work."""
    if job.judge.candidates:
        with importing():
            from sd_quant.stages.judge import check_candidates

        check_candidates(job.model, job.judge)


def compare_together(directory: Path) -> None:
    """Time the engines of a sweep's jobs together and judge its third-party checkpoints, after the last job."""
    with importing():
        from sd_quant.stages.judge import judge_sweep
        from sd_quant.stages.time_sweep import time_sweep

    untimed = None
    try:
        time_sweep(directory)
    except SdQuantError as error:  # the judgement does not depend on it
        untimed = error
    judge_sweep(directory)
    if untimed is not None:
        raise untimed


main = Command("quantize", QuantizeJob, task, check_before_run, check_before_sweep, compare_together)
