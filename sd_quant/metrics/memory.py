"""Peak memory of this process, and the seconds and peak of each stage of a run.

The peak comes from the kernel's own high-water mark (VmHWM). ``getrusage`` is the usual road and only the second choice
here: a process inherits its ru_maxrss from the one that started it, so a small job would report a large sweep's.
"""

import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch

LOG = logging.getLogger("sd_quant")


def peak_memory_bytes() -> int:
    """Peak of this process's resident memory so far."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def available_memory_bytes() -> int:
    """Memory that a new program can have without swapping: what the kernel says, within the limit of a container."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        available = int(match[1]) * 1024
    except (OSError, TypeError):  # not Linux
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else min(available, int(limit) - int(used))
    except (OSError, ValueError):
        return available


def peak_cuda_memory_bytes() -> int | None:
    """Peak of what torch has had allocated on the current GPU, without engines; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def available_cuda_memory_bytes() -> int | None:
    """Memory of the current GPU that is free, or cached by torch; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def used() -> str:
    """The peaks so far, as part of a sentence."""
    peak, cuda = peak_memory_bytes() / 1e9, peak_cuda_memory_bytes()
    return f"{peak:.2f} GB of memory" + ("" if cuda is None else f" and {cuda / 1e9:.2f} GB of the GPU's")


class StageTimer:
    """``with timer("calibrate"): ...`` fills ``timer.stages["calibrate"]``, also when the block fails.

    Made where a job begins: a GPU's peak counts from there, the process's from its start.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float | int]] = {}  # seconds, and the process's peak_memory_bytes at the end
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        LOG.info("%s ...", name)
        start = perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"the stage {name}, with up to {used()}")
            raise
        finally:
            seconds, peak = perf_counter() - start, peak_memory_bytes()
            self.stages[name] = {"seconds": seconds, "peak_memory_bytes": peak}
            LOG.info("%s: %.1f s, peak %.2f GiB", name, seconds, peak / 2**30)
