"""Export a finished run to other tools: ``hand_over run=<folder of an earlier run> to=<tool>``."""

from sd_quant.cli import Command, stage
from sd_quant.config import HandOverJob

main = Command("hand_over", HandOverJob, stage("hand_over"))
