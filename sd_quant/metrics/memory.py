"""Seconds and peak memory of each stage of a job.

The peak is the kernel's high-water mark (VmHWM), which a job resets at the start of every stage, because the jobs of a
sweep share a process. The fallback ``getrusage`` cannot be reset and is inherited from the parent process.

Child processes of a stage count too. The kernel keeps no common peak of several processes, so their sum is sampled ten
times a second; the larger of this and the process's own peak is reported. Shared pages count once for each process.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch

from sd_quant.process import peak_memory_bytes, reset_peak
from sd_quant.progress import working

LOG = logging.getLogger("sd_quant")
SECONDS_BETWEEN_SAMPLES = 0.1


def children(process: int) -> list[int]:
    """Return the ids of the running children of ``process``, of their children, and so on."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text(encoding="ascii").split()):
                found += [child, *children(child)]
    except OSError:  # it has ended, or this is not Linux
        pass
    return found


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes; 0 for a process that has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class FamilyPeak:
    """A ``with`` block that samples ``peak_bytes``, the memory of this process and its children; 0 without children."""

    def __init__(self) -> None:
        self.peak_bytes, self.stopped = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.stopped.wait(SECONDS_BETWEEN_SAMPLES):
            if processes := children(os.getpid()):
                self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, [os.getpid(), *processes])))

    def __enter__(self) -> "FamilyPeak":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


def peak_cuda_memory_bytes() -> int | None:
    """Return the peak bytes of torch's allocations on the current GPU, without other runtimes'; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def available_cuda_memory_bytes() -> int | None:
    """Return the bytes of the current GPU that are free or cached by torch; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def used() -> str:
    """Return the process's and the GPU's peak memory so far, as part of a sentence."""
    peak, cuda = peak_memory_bytes() / 1e9, peak_cuda_memory_bytes()
    return f"{peak:.2f} GB of memory" + ("" if cuda is None else f" and {cuda / 1e9:.2f} GB of the GPU's")


class StageTimer:
    """Record time and peak memory of stages: ``with timer("calibrate"): ...`` fills ``timer.stages["calibrate"]``.

    A failing block is recorded, too. Entering a stage again adds to its entry. A new timer resets the GPU's peak.
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self.stages: dict[str, dict[str, float | int]] = {}  # seconds and peak_memory_bytes of each
        self.resets = reset_peak()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @property
    def seconds(self) -> float:
        """Seconds since the job began, within stages and between them."""
        return perf_counter() - self.started

    @property
    def peak(self) -> float | dict[str, float | str]:
        """The record's ``peak_memory_bytes``, the maximum of all stages; with a reason if it may precede the job."""
        value = max(stage["peak_memory_bytes"] for stage in self.stages.values())
        reason = "of the process since its start: /proc/self/clear_refs cannot be written"
        return value if self.resets else {"value": value, "reason": reason}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        LOG.info("%s ...", name)
        start = perf_counter()
        reset_peak()
        family = FamilyPeak()
        try:
            with family, working(name):
                yield
        except Exception as error:
            error.add_note(f"the stage {name}, with up to {used()}")
            raise
        finally:
            seconds, peak = perf_counter() - start, max(peak_memory_bytes(), family.peak_bytes)
            earlier = self.stages.get(name, {"seconds": 0, "peak_memory_bytes": 0})
            self.stages[name] = {
                "seconds": earlier["seconds"] + seconds,
                "peak_memory_bytes": max(earlier["peak_memory_bytes"], peak),
            }
            LOG.info("%s: %.1f s, peak %.2f GiB", name, seconds, peak / 2**30)
