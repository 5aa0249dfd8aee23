"""Assign a GPU and cores of its own to each of a sweep's parallel jobs on one machine.

Enabled by ``conf/hydra/launcher/one_host.yaml``. A place is a GPU with cores, reserved by a file lock, which ends with
its process, however the process ends; jobs wait while other jobs hold all places. A process keeps its place to its end,
because CUDA and OpenMP choose devices and threads once. Alternative not taken: the number of joblib's worker; joblib
replaces workers and counts on, so two workers would get the same GPU.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from sd_quant.cache import open_lock, try_lock
from sd_quant.process import affinity

LOG = logging.getLogger(__name__)
CORES_OF_A_JOB = 4  # where there is no GPU
LOCKS = Path(tempfile.gettempdir()) / f"sd-quant-{os.getuid()}"  # a folder of this machine, not of a shared disk
POLLED_EVERY = 0.5  # seconds between two looks for a free place, and at the parent process


class Placement(Callback):
    """Hydra callback, built in the command's process, that gives each job's process a place as the job starts."""

    def __init__(self, jobs: int):
        from joblib import effective_n_jobs

        self.process, self.jobs = os.getpid(), effective_n_jobs(jobs)  # -1 means all cores
        self.gpus, self.cores = tuple(visible_gpus()), tuple(affinity())

    def on_job_start(self, config: DictConfig, **_) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            settle(self.process, self.jobs, self.gpus, self.cores)


def places() -> int:
    """Return the default of ``hydra.launcher.n_jobs``: a job for each GPU, or without GPUs for every 4 cores."""
    return len(visible_gpus()) or max(1, len(affinity()) // CORES_OF_A_JOB)


def visible_gpus() -> list[str]:
    """Return the GPUs of this process by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(index) for index in range(count)]


@cache  # once in a process, and the file stays open as long as it lives
def settle(parent: int, jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> IO[str]:
    """Wait for a place, use only its GPU and cores, end with process ``parent``. Returns the lock, held until exit."""
    if os.getpid() != parent:  # a single job at a time runs in the process that was started
        threading.Thread(target=end_with, args=[parent], daemon=True).start()
    place, lock = claim([place_name(place, gpus) for place in range(jobs)])
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    if cores:
        os.sched_setaffinity(0, cores_of(place, jobs, cores))
    return lock


def claim(names: Sequence[str]) -> tuple[int, IO[str]]:
    """Return the number of the first free place, and its lock; wait while all are taken. ``names``: of the locks."""
    LOCKS.mkdir(mode=0o700, exist_ok=True)
    told = False
    while True:
        for place, name in enumerate(names):
            file = open_lock(LOCKS / f"{name}.lock")
            if try_lock(file):
                return place, file
            file.close()
        if not told:
            LOG.info("waiting for a free place: other jobs on this machine have all %d", len(names))
            told = True
        time.sleep(POLLED_EVERY)


def place_name(place: int, gpus: Sequence[str]) -> str:
    """Return the name of a place's lock file; with more jobs than GPUs, several places share a GPU."""
    if not gpus:
        return f"cores-{place}"
    return f"gpu-{gpus[place % len(gpus)]}-{place // len(gpus)}".replace("/", "-")


def cores_of(place: int, jobs: int, cores: Sequence[int]) -> Sequence[int]:
    """Return the cores of a place when ``jobs`` places divide them evenly; at least one."""
    first, last = (len(cores) * number // jobs for number in (place, place + 1))
    return cores[first : max(last, first + 1)]


def end_with(parent: int) -> None:
    """End this process when ``parent`` ends: joblib's workers would outlive it and keep their GPUs' memory."""
    while os.getppid() == parent:
        time.sleep(POLLED_EVERY)
    os._exit(1)
