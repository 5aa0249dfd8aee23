"""Placement of a sweep's jobs side by side on one machine: each process that runs them has a GPU and cores to itself.

``conf/hydra/launcher/one_host.yaml`` asks for it. A place is a locked file, and a lock ends with its process however
that ends; while the jobs of another sweep have all places, new ones wait. A process keeps its place to its end, because
CUDA and OpenMP settle only once. The road not taken is the worker's number: joblib replaces workers as it goes and
counts on, so two of them would get the same GPU.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from sd_quant.cache import try_lock

LOG = logging.getLogger(__name__)
CORES_OF_A_JOB = 4  # where there is no GPU
LOCKS = Path(tempfile.gettempdir()) / f"sd-quant-{os.getuid()}"  # of this machine, as its GPUs are
SECONDS_BETWEEN_LOOKS = 0.5


class Placement(Callback):
    """Hydra makes it in the process that was started, and calls it in the one that runs a job."""

    def __init__(self, jobs: int):
        from joblib import effective_n_jobs

        self.process, self.jobs = os.getpid(), effective_n_jobs(jobs)  # -1 means all cores
        self.gpus, self.cores = tuple(gpus()), tuple(cores())

    def on_job_start(self, config: DictConfig, **_) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            settle(self.process, self.jobs, self.gpus, self.cores)


def places() -> int:
    """How many jobs a machine takes at a time, unless ``hydra.launcher.n_jobs`` is given."""
    return len(gpus()) or max(1, len(cores()) // CORES_OF_A_JOB)


def gpus() -> list[str]:
    """The names of this process's GPUs, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(index) for index in range(count)]


def cores() -> list[int]:
    """The cores that this process may run on; none where the operating system binds no process to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@cache  # once in a process, and the file stays open as long as it lives
def settle(parent: int, jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> TextIO:
    """Wait for a free place and take it: torch, the engines and their threads see nothing else from now on."""
    if os.getpid() != parent:  # a single job at a time runs in the process that was started
        threading.Thread(target=end_with, args=[parent], daemon=True).start()
    place, lock = claim([place_name(place, gpus) for place in range(jobs)])
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    if cores:
        os.sched_setaffinity(0, cores_of(place, jobs, cores))
    return lock


def claim(names: Sequence[str]) -> tuple[int, TextIO]:
    """The number of the first free place, and its lock. Waits while there is none."""
    LOCKS.mkdir(mode=0o700, exist_ok=True)
    told = False
    while True:
        for place, name in enumerate(names):
            file = (LOCKS / f"{name}.lock").open("a")
            if try_lock(file):
                return place, file
            file.close()
        if not told:
            LOG.info("waiting for a free place: other jobs on this machine have all %d", len(names))
            told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def place_name(place: int, gpus: Sequence[str]) -> str:
    """The name of a place's lock; where there are more jobs than GPUs, several places are on one."""
    if not gpus:
        return f"cores-{place}"
    return f"gpu-{gpus[place % len(gpus)]}-{place // len(gpus)}".replace("/", "-")


def cores_of(place: int, jobs: int, cores: Sequence[int]) -> Sequence[int]:
    """The cores of a place when ``jobs`` places divide ``cores`` evenly; at least one."""
    first, last = (len(cores) * number // jobs for number in (place, place + 1))
    return cores[first : max(last, first + 1)]


def end_with(parent: int) -> None:
    """End this process when ``parent`` has: joblib's would outlive a killed one, and keep its GPUs' memory."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
