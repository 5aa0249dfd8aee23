"""Measure and limit this process: its memory, cores, age and standard output."""

import atexit
import ctypes
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

IMPORTED = time.monotonic()
CONFINED: list[float] = []  # the seconds of each ``confined`` block that runs
REACHING = {f"socket.{name}" for name in ("connect", "getaddrinfo", "gethostbyname", "sendto", "sendmsg")}


def reset_peak() -> bool:
    """Reset this process's peak memory to its present size; return False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Return the peak of this process's resident memory since its start, or since ``reset_peak``."""
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
    """Return the age of this process; where the system is not Linux, the time since this module was imported."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return time.monotonic() - IMPORTED
    return up - started / os.sysconf("SC_CLK_TCK")


class Lasting:
    """A text stream that discards further output after its reader has closed, as in ``quantize | head``."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.lasting(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.lasting(self.stream.flush)

    def lasting(self, put: Callable[..., object], *text: str) -> None:
        try:
            put(*text)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def end_at_once(code: int) -> NoReturn:
    """End the process with this exit code, skipping the release of its memory, which may take seconds."""
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    # The interpreter's own two steps. joblib's worker processes end with the first; left alone they wait for 300 s.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


def address_space_bytes() -> float:
    """Return the bytes that this process may still map; infinity where ``ulimit -v`` sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return max(0, limit - mapped_bytes())


def mapped_bytes() -> int:
    """Return the size of this process's address space; 0 where the system is not Linux."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def available_memory_bytes() -> int:
    """Return the bytes of memory free without swapping, within the limits of the container and the process."""
    bounds = [address_space_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):  # not Linux
        told = Path("/proc/meminfo").read_text(encoding="ascii")
        bounds += [1024 * int(kibibytes) for kibibytes in re.findall(r"^MemAvailable:\s+(\d+) kB", told, re.MULTILINE)]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no such group, or no limit, which is the word max
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        bounds.append(limit - used)
    return int(min(bounds))


def affinity() -> list[int]:
    """Return the numbers of the cores that this process may run on; empty where the system has no core binding."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores() -> int:
    """Return the number of cores that this process may use, within its container's CPU quota."""
    usable = len(affinity()) or os.cpu_count() or 1
    quota = quota_of_cgroup()
    return usable if quota is None else max(1, min(usable, int(quota)))


def quota_of_cgroup() -> float | None:
    """Return the container's CPU quota in cores, by cgroup 2 or 1; None without a limit."""
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
    """Discard standard output in the block, including that of compiled code."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C buffers for a pipe
        os.dup2(kept, 1)
        os.close(kept)


@cache
def watch_sockets() -> None:
    """Install an audit hook, for the rest of this process, that refuses connections while a ``confined`` block runs."""

    def refuse(event: str, _: object) -> None:
        if CONFINED and event in REACHING:
            raise PermissionError("a network connection, which a stranger's file never makes")

    sys.addaudithook(refuse)


@contextmanager
def confined(seconds: float, memory: float = math.inf) -> Iterator[None]:
    """Forbid network connections in the block and limit its CPU seconds and mapped bytes, for reading untrusted files.

    Raises PermissionError, TimeoutError or MemoryError. Other threads are confined too, except in time. Time is checked
    between steps of the interpreter. Alternative not taken: a child process; a fork breaks OpenMP's threads, and a new
    process takes seconds to import its modules.
    """

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    watch_sockets()
    timed = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    CONFINED.append(seconds)
    try:
        if memory < address_space_bytes() and (mapped := mapped_bytes()):
            resource.setrlimit(resource.RLIMIT_AS, (int(mapped + memory), hard))
        if timed:
            handler = signal.signal(signal.SIGPROF, too_long)
            left = signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again each second, should a library catch it
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, *left)
            signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        CONFINED.pop()
