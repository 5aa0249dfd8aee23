"""Refuse a sweep whose jobs request more than any machine of the Ray cluster has: Ray would wait without end.

An autoscaling cluster must already run a machine large enough. A job whose process died counts as failed; Hydra's own
Ray launcher would end the whole command.
"""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from sd_quant import sweep
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.launchers import failed
from sd_quant.text import one_line


def prepare(launcher: DictConfig, directory: Path) -> None:
    """Connect to Ray, patch Hydra's launcher. Raises ResourceError without cluster, ConfigError for too large a job."""
    import ray
    from hydra_plugins.hydra_ray_launcher import _core

    settings: Any = OmegaConf.to_container(launcher.ray, resolve=True)
    address = settings["init"].get("address")
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    try:
        host, separator, port = address.removeprefix("ray://").rpartition(":")
        if separator:  # Ray would try for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**settings["init"])
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"no Ray cluster runs at {address} ({one_line(error, 200)}); start the command on a machine of the "
            "cluster, name it by RAY_ADDRESS, or take hydra/launcher=ray_local"
        ) from error
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(has_room(settings["remote"], node) for node in nodes):
        raise ConfigError(
            f"hydra.launcher.ray.remote asks for {told(wanted(settings['remote']))} for a job, and no machine of the "
            f"Ray cluster has so much: it has {'; '.join(sorted({told(node) for node in nodes}))}; ask for less"
        )
    _core.launch_job_on_ray = partial(launched, _core.launch_job_on_ray, directory)
    _core.ray = SimpleNamespace(get=partial(result_of, directory))


def launched(
    launch: Callable, directory: Path, context: Any, remote: DictConfig, job: DictConfig, *rest: Any
) -> tuple[str, Any]:
    """Launch a job, by ``launch``; return the job's name and Ray task."""
    return sweep.entry(directory, job.hydra.job.num)["name"], launch(context, remote, job, *rest)


def result_of(directory: Path, job: tuple[str, Any]) -> JobReturn:
    """Wait for a ``launched`` job and return its result: failed if its process or node died beyond Ray's retries."""
    import ray

    name, task = job
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        return failed(directory, name, ResourceError(f"Ray's task for it has ended: {one_line(error, 300)}"))


def wanted(remote: dict) -> dict[str, float]:
    """Return the resources that a job requests, by Ray's names."""
    return {"CPU": remote.get("num_cpus", 1), "GPU": remote.get("num_gpus", 0)} | remote.get("resources", {})


def has_room(remote: dict, node: dict[str, float]) -> bool:
    return all(node.get(name, 0) >= number for name, number in wanted(remote).items())


def told(resources: dict[str, float]) -> str:
    """Format resources as ``8 CPU, 1 GPU``, without memory and without Ray's labels such as ``node:10.0.0.1``."""
    kept = {"CPU": 0, "GPU": 0} | resources
    return ", ".join(f"{number:g} {name}" for name, number in kept.items() if ":" not in name and "memory" not in name)
