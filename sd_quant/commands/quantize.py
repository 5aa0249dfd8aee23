"""From a checkpoint to a quantized one, with ONNX files, engines, images and numbers."""

import logging
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import QuantizeJob
from sd_quant.places import CONF
from sd_quant.stages.closing import DONE_BEFORE, closing_words
from sd_quant.stages.job_folder import done_before

LOG = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="quantize")
@recording_failure
def task(config: DictConfig) -> float | None:
    job, directory = job_of(QuantizeJob, config), output_directory()
    if (record := done_before(job, directory)) is not None:  # found without importing what would do it
        LOG.info(DONE_BEFORE)
        return closing_words(record, directory)
    with importing():
        from sd_quant.stages.quantize import quantize

    return quantize(job, directory)


def time_together(directory: Path) -> None:
    with importing():
        from sd_quant.stages.time_sweep import time_sweep

    time_sweep(directory)


def main() -> None:
    run(task, QuantizeJob, "quantize", after_sweep=time_together)
