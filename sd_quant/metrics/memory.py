"""Peak memory of a job, and the seconds and peak of each of its stages.

The peak comes from the kernel's own high-water mark (VmHWM), which a job sets back where each of its stages begins: the
jobs of a sweep share a process. ``getrusage`` is the usual road and only the second choice here: nothing sets it back,
and a process inherits its ru_maxrss from the one that started it, so a small job would report a large sweep's.

Processes that a stage starts, as calibration on several devices does, count too. The kernel keeps no peak of a family,
so they are looked at ten times a second, and the peak is the process's own or, if it is more, the most that all of them
have had together at one look. Pages that they share, such as the libraries, count for each of them.
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
SECONDS_BETWEEN_LOOKS = 0.1


def children(process: int) -> list[int]:
    """The processes that ``process`` has started, and those that they have, as far as they are there."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text(encoding="ascii").split()):
                found += [child, *children(child)]
    except OSError:  # it has ended, or this is not Linux
        pass
    return found


def resident_bytes(process: int) -> int:
    """What a process has in memory; 0 for one that has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class FamilyPeak:
    """In a ``with`` block, ``peak_bytes`` is the most that this process and its children have had at one look.

    0 while there are no children: the kernel knows the peak of this process better.
    """

    def __init__(self) -> None:
        self.peak_bytes, self.stopped = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.stopped.wait(SECONDS_BETWEEN_LOOKS):
            self.look()

    def look(self) -> None:
        if processes := children(os.getpid()):
            self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, [os.getpid(), *processes])))

    def __enter__(self) -> "FamilyPeak":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


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

    A stage that is entered again adds to its entry. Stages may overlap, in threads of their own: the peak of each is
    then what all of them have taken together. Made where a job begins: a GPU's peak counts from there.
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self.stages: dict[str, dict[str, float | int]] = {}  # seconds and peak_memory_bytes of each
        self.running: dict[str, int] = {}  # peaks of those that have not ended
        self.lock = threading.Lock()
        self.resets = reset_peak()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @property
    def seconds(self) -> float:
        """Since the job began, within stages and between them."""
        return perf_counter() - self.started

    @property
    def peak(self) -> float | dict[str, float | str]:
        """The record's ``peak_memory_bytes``: the most of all stages, with a reason where it may be an older job's."""
        value = max(stage["peak_memory_bytes"] for stage in self.stages.values())
        reason = "of the process since its start: /proc/self/clear_refs cannot be written"
        return value if self.resets else {"value": value, "reason": reason}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        LOG.info("%s ...", name)
        start = perf_counter()
        with self.lock:
            self.note(peak_memory_bytes())
            self.running[name] = 0
            reset_peak()
        family = FamilyPeak()
        try:
            with family, working(name):
                yield
        except Exception as error:
            error.add_note(f"the stage {name}, with up to {used()}")
            raise
        finally:
            with self.lock:
                self.note(max(peak_memory_bytes(), family.peak_bytes))
                seconds, peak = perf_counter() - start, self.running.pop(name)
                earlier = self.stages.get(name, {"seconds": 0, "peak_memory_bytes": 0})
                self.stages[name] = {
                    "seconds": earlier["seconds"] + seconds,
                    "peak_memory_bytes": max(earlier["peak_memory_bytes"], peak),
                }
            LOG.info("%s: %.1f s, peak %.2f GiB", name, seconds, peak / 2**30)

    def note(self, peak: int) -> None:
        """All stages that run have had this peak, which is set back next."""
        self.running = {name: max(before, peak) for name, before in self.running.items()}
