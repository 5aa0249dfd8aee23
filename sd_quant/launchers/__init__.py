"""Prepares Hydra's launchers beyond their files in ``conf/hydra/launcher``, a module for each that requires it."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sd_quant.launchers.gpus import need_of

PREPARED = {"RayLauncher": "ray", "SlurmLauncher": "slurm"}  # by the class that a launcher's file names


def prepare(launcher: DictConfig, directory: Path, jobs: Mapping[str, Any]) -> None:
    """Make a launcher ready for the ``jobs``, by name, of the sweep in ``directory``, in the process of the command.

    Raises SdQuantError when it cannot run any job.
    """
    if (module := PREPARED.get(str(launcher.get("_target_")).rpartition(".")[2])) is not None:
        needs = {name: need_of(job) for name, job in jobs.items()}
        import_module(f"{__name__}.{module}").prepare(launcher, directory, needs)
