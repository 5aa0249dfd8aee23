"""TensorRT plans: ``export_trt run=<directory of an earlier run>``, or of a checkpoint as it is: ``model=``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import ExportJob
from sd_quant.places import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="export_trt")
@recording_failure
def task(config: DictConfig) -> None:
    job = job_of(ExportJob, config)
    with importing():
        from sd_quant.stages.export_trt import export_trt

    export_trt(job, output_directory())


def main() -> None:
    run(task, ExportJob, "export_trt")
