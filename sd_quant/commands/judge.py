"""Compare third-party checkpoints by one rule: ``judge candidates=[...] model.path=<full precision>``."""

from sd_quant.cli import Command, stage
from sd_quant.config import JudgeJob

main = Command("judge", JudgeJob, stage("judge"))
