"""Images and latency from exported engines: ``python infer.py run=<directory of an earlier run>``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import InferJob


@hydra.main(version_base="1.3", config_path="conf", config_name="infer")
@recording_failure
def main(config: DictConfig) -> None:
    job = job_of(InferJob, config)
    with importing():
        from sd_quant.stages.infer import infer

    infer(job, output_directory())


if __name__ == "__main__":
    run(main, InferJob, "infer")
