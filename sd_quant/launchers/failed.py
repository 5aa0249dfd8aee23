"""A job that died on a cluster is one that failed, while the others go on."""

import logging
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from sd_quant import sweep
from sd_quant.report.record import RECORD
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)


def failed(directory: Path, name: str, failure: Exception) -> JobReturn:
    """Write the ``failure`` into the folder of the job ``name``, and return a result for Hydra that has it.

    ``directory`` is the sweep's. A job that has its record is done, whatever happened to its process afterwards.
    """
    if (directory / name / RECORD).exists():
        return JobReturn(status=JobStatus.COMPLETED, _return_value=None)
    LOG.error("%s: %s", name, failure)
    sweep.write_failure(directory / name, one_line(failure), getattr(failure, "exit_code", 1))
    return JobReturn(status=JobStatus.FAILED, _return_value=failure)
