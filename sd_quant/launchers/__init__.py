"""Prepares Hydra's launchers beyond their files in ``conf/hydra/launcher``, a module for each that requires it."""

from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig

PREPARED = {"RayLauncher": "ray", "SlurmLauncher": "slurm"}  # by the class that a launcher's file names


def prepare(launcher: DictConfig, directory: Path) -> None:
    """Make a launcher ready for the jobs of the sweep in ``directory``, in the process of the command.

    Raises SdQuantError when it cannot run any job.
    """
    if (module := PREPARED.get(str(launcher.get("_target_")).rpartition(".")[2])) is not None:
        import_module(f"{__name__}.{module}").prepare(launcher, directory)
