"""A finished run in other tools' formats: ``hand_over run=<directory of an earlier run> to=<target>``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import HandOverJob
from sd_quant.places import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="hand_over")
@recording_failure
def task(config: DictConfig) -> None:
    job = job_of(HandOverJob, config)
    with importing():
        from sd_quant.stages.hand_over import hand_over

    hand_over(job, output_directory())


def main() -> None:
    run(task, HandOverJob, "hand_over")
