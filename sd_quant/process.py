"""What this process has of the machine: memory at its peak, cores, and standard output."""

import atexit
import ctypes
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

IMPORTED = time.monotonic()


def reset_peak() -> bool:
    """Let this process's peak begin anew at what it has now. False where the operating system does not do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Peak of this process's resident memory since it began, or since ``reset_peak``."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def seconds_since_start() -> float:
    """How long this process runs, its imports among it; where the system is not Linux, since this module's import."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return time.monotonic() - IMPORTED
    return up - started / os.sysconf("SC_CLK_TCK")


def end_at_once(code: int) -> NoReturn:
    """End the process with this exit code, without freeing its memory object by object, which takes seconds."""
    with suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def address_space_bytes() -> float:
    """How many bytes of memory this process may still reserve; infinity where ``ulimit -v`` sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        mapped = 0
    return max(0, limit - mapped)


def available_memory_bytes() -> int:
    """Memory that can be had without swapping: what the kernel says, within the limits of container and process."""
    bounds = [address_space_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):  # not Linux
        told = Path("/proc/meminfo").read_text(encoding="ascii")
        bounds += [1024 * int(kibibytes) for kibibytes in re.findall(r"^MemAvailable:\s+(\d+) kB", told, re.MULTILINE)]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no limit, which is the word max, among others
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        bounds.append(limit - used)
    return int(min(bounds))


def cores() -> int:
    """The number of cores that this process may run on, within the processor time that its container has."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_of_cgroup()
    return usable if quota is None else max(1, min(usable, int(quota)))


def quota_of_cgroup() -> float | None:
    """How many cores' time the container has, by cgroup 2 or 1; None without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limit, period = ((group / "cpu" / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)


@contextmanager
def without_output() -> Iterator[None]:
    """In the block nothing is written to standard output, not even by a library's compiled code."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C holds back for a pipe
        os.dup2(kept, 1)
        os.close(kept)
