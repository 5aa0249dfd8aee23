"""The commands that run a single stage, on an earlier run's folder, a checkpoint or third-party checkpoints."""

from sd_quant.cli import Command, check_no_others, stage
from sd_quant.config import ExportJob, HandOverJob, InferJob, InspectJob, JudgeJob

infer = Command("infer", InferJob, stage("infer"), check_no_others)
export_trt = Command("export_trt", ExportJob, stage("export_trt"), check_no_others)
hand_over = Command("hand_over", HandOverJob, stage("hand_over"))
judge = Command("judge", JudgeJob, stage("judge"))
inspect = Command("inspect", InspectJob, stage("inspect"))
