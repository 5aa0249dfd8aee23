"""Quantized checkpoints of anybody, judged by one rule: ``judge candidates=[...] model.path=<full precision>``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import JudgeJob
from sd_quant.places import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="judge")
@recording_failure
def task(config: DictConfig) -> None:
    job = job_of(JudgeJob, config)
    with importing():
        from sd_quant.stages.judge import judge

    judge(job, output_directory())


def main() -> None:
    run(task, JudgeJob, "judge")
