"""Build TensorRT plans: ``export_trt run=<folder of an earlier run>``, or ``model=`` for a checkpoint as it is."""

from sd_quant.cli import Command, check_no_others, stage
from sd_quant.config import ExportJob

main = Command("export_trt", ExportJob, stage("export_trt"), check_no_others)
