"""From a checkpoint to a quantized one, with ONNX files, engines, images and numbers."""

import logging
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import QuantizeJob, check_heeded
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.places import CONF
from sd_quant.stages.closing import DONE_BEFORE, closing_words, in_sweep
from sd_quant.stages.job_folder import check_no_other_run, done_before
from sd_quant.stages.trace_ahead import tracer_for

LOG = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="quantize")
@recording_failure
def task(config: DictConfig) -> float | None:
    job, directory = job_of(QuantizeJob, config), output_directory()
    if job.judge.candidates and not in_sweep(directory):
        raise ConfigError(
            "candidates are judged beside the recipes of a sweep, and this is a single run; add -m, or give its folder "
            "to judge as one of the candidates"
        )
    if (record := done_before(job, directory)) is not None:  # found without importing what would do it
        LOG.info(DONE_BEFORE)
        return closing_words(record, directory)
    with tracer_for(job) as tracer:
        with importing():
            from sd_quant.stages.quantize import quantize

        return quantize(job, directory, tracer)


def compare_together(directory: Path) -> None:
    """What is done when a sweep's jobs have ended: their engines are timed together, and candidates judged."""
    with importing():
        from sd_quant.stages.judge import judge_sweep
        from sd_quant.stages.time_sweep import time_sweep

    untimed = None
    try:
        time_sweep(directory)
    except SdQuantError as error:  # which is no reason not to judge
        untimed = error
    judge_sweep(directory)
    if untimed is not None:
        raise untimed


def check_before(job: QuantizeJob, directory: Path, given: list[str]) -> None:
    """Raises ConfigError for a knob that changes nothing, and for a folder with another finished run."""
    check_heeded(job, given)
    check_no_other_run(job, directory)


def check_candidates_before(job: QuantizeJob) -> None:
    """Raises SdQuantError for a candidate that cannot be read, before hours of other work."""
    if job.judge.candidates:
        with importing():
            from sd_quant.stages.judge import check_candidates

        check_candidates(job)


def main() -> None:
    run(task, QuantizeJob, "quantize", compare_together, check_candidates_before, check_before)
