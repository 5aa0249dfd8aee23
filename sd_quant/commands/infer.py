"""Make images with exported engines, and time them: ``infer run=<folder of an earlier run>``."""

from sd_quant.cli import Command, check_no_others, stage
from sd_quant.config import InferJob

main = Command("infer", InferJob, stage("infer"), check_no_others)
