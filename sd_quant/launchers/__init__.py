"""Set up Hydra's Ray and Slurm launchers beyond their settings in ``conf/hydra/launcher``, one module for each."""

import logging
from importlib import import_module
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from sd_quant import sweep
from sd_quant.report.record import RECORD
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
PREPARED = {"RayLauncher": "ray", "SlurmLauncher": "slurm"}  # by the class that a launcher's file names


def prepare(launcher: DictConfig, directory: Path) -> None:
    """Set up Hydra's ``launcher`` for a sweep in ``directory``. Raises SdQuantError when it cannot run a job."""
    if (module := PREPARED.get(str(launcher.get("_target_")).rpartition(".")[2])) is not None:
        import_module(f"{__name__}.{module}").prepare(launcher, directory)


def failed(directory: Path, name: str, failure: Exception) -> JobReturn:
    """Write the ``failure`` of a sweep's job ``name`` into the job's folder; return Hydra's result for the job.

    A job whose record exists counts as completed, whatever happened to its process afterwards.
    """
    if (directory / name / RECORD).exists():
        return JobReturn(status=JobStatus.COMPLETED, _return_value=None)
    LOG.error("%s: %s", name, failure)
    sweep.write_failure(directory / name, one_line(failure), getattr(failure, "exit_code", 1))
    return JobReturn(status=JobStatus.FAILED, _return_value=failure)
