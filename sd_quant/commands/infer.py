"""Images and latency from exported engines: ``infer run=<directory of an earlier run>``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import InferJob
from sd_quant.places import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="infer")
@recording_failure
def task(config: DictConfig) -> None:
    job = job_of(InferJob, config)
    with importing():
        from sd_quant.stages.infer import infer

    infer(job, output_directory())


def main() -> None:
    run(task, InferJob, "infer")
