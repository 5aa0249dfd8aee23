"""TensorRT plans from ONNX files: ``python export_trt.py run=<directory of an earlier run>``."""

import hydra
from omegaconf import DictConfig

from sd_quant.cli import importing, job_of, output_directory, recording_failure, run
from sd_quant.config import ExportJob


@hydra.main(version_base="1.3", config_path="conf", config_name="export_trt")
@recording_failure
def main(config: DictConfig) -> None:
    job = job_of(ExportJob, config)
    with importing():
        from sd_quant.stages.export_trt import export_trt

    export_trt(job, output_directory())


if __name__ == "__main__":
    run(main, ExportJob, "export_trt")
