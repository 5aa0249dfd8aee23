"""Refuse a sweep whose jobs ask for more than any machine of the Ray cluster has: Ray would wait without end.

A cluster that starts machines when they are asked for has to have started one of the kind.
"""

import os
import socket
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.text import one_line


def prepare(launcher: DictConfig, directory: Path) -> None:
    """Connect to the cluster and compare. Raises ResourceError without a cluster, ConfigError for too large a job."""
    import ray

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


def wanted(remote: dict) -> dict[str, float]:
    """Return what a job asks for, by Ray's names of resources."""
    return {"CPU": remote.get("num_cpus", 1), "GPU": remote.get("num_gpus", 0)} | remote.get("resources", {})


def has_room(remote: dict, node: dict[str, float]) -> bool:
    return all(node.get(name, 0) >= number for name, number in wanted(remote).items())


def told(resources: dict[str, float]) -> str:
    """Write resources as ``8 CPU, 1 GPU``, without memory and Ray's marks of a machine, such as ``node:10.0.0.1``."""
    kept = {"CPU": 0, "GPU": 0} | resources
    return ", ".join(f"{number:g} {name}" for name, number in kept.items() if ":" not in name and "memory" not in name)
