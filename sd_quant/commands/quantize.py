"""From a checkpoint to a quantized one, with ONNX files, engines, images and numbers."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import QuantizeJob
from sd_quant.places import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="quantize")
@recording_failure
def task(config: DictConfig) -> float | None:
    job = job_of(QuantizeJob, config)
    with importing():
        from sd_quant.stages.quantize import quantize

    return quantize(job, output_directory())


def time_together(directory: Path) -> None:
    with importing():
        from sd_quant.stages.time_sweep import time_sweep

    time_sweep(directory)


def main() -> None:
    run(task, QuantizeJob, "quantize", after_sweep=time_together)
