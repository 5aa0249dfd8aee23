"""Look at a pipeline before any work: ``inspect model.path=<folder>``."""

from sd_quant.cli import Command, stage
from sd_quant.config import InspectJob

main = Command("inspect", InspectJob, stage("inspect"))
