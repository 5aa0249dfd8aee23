import ctypes
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sd_quant import process

pytestmark = pytest.mark.commit


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(files)``: the kernel says this, and nothing else."""

    def written(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(process, "Path", lambda path: Path(f"{tmp_path}{path}"))

    return written


@pytest.mark.parametrize("files, quota, cores", [
    ({"cpu.max": "250000 100000"}, 2.5, 2), ({"cpu.max": "50000 100000"}, 0.5, 1), ({"cpu.max": "max 100000"}, None, 8),
    ({"cpu/cpu.cfs_quota_us": "6400000", "cpu/cpu.cfs_period_us": "100000"}, 64.0, 8),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 8), ({}, None, 8),
])  # fmt: skip
def test_cores_are_those_of_the_process_within_the_containers_share(monkeypatch, machine, files, quota, cores):
    machine({f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert (process.quota_of_cgroup(), process.cores()) == (quota, cores)


@pytest.mark.parametrize("limit, expected", [("max", 8 * 2**20), ("6000000", 2_000_000), ("90000000", 8 * 2**20)])
def test_the_memory_that_is_available_is_bounded_by_a_containers_limit(monkeypatch, machine, limit, expected):
    """In a container the kernel counts the memory of the whole machine."""
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8192 kB", "sys/fs/cgroup/memory.max": limit}
    machine(files | {"sys/fs/cgroup/memory.current": "4000000"})
    assert process.available_memory_bytes() == expected
    monkeypatch.setattr(process, "address_space_bytes", lambda: 1e6)
    assert process.available_memory_bytes() == 1_000_000


def test_not_even_compiled_code_writes_to_standard_output(capfd):
    libc = ctypes.CDLL(None)
    libc.printf(b"before\n")
    libc.fflush(None)
    with pytest.raises(ZeroDivisionError), process.without_output():
        libc.printf(b"compiled\n")
        raise ZeroDivisionError
    libc.printf(b"after\n")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_the_address_space_that_is_left(monkeypatch):
    assert process.address_space_bytes() == math.inf
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (mapped + 10**9, resource.RLIM_INFINITY))
    assert process.address_space_bytes() == pytest.approx(1e9, abs=1e8)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert process.address_space_bytes() == 0


LEAVES_A_WORKER = """
import os
from joblib import Parallel, delayed
from sd_quant.process import end_at_once
print(*Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(4)), flush=True)
end_at_once(3)
"""


def test_a_process_that_ends_at_once_leaves_no_worker_of_joblib(tmp_path):
    """They would keep their memory and the terminal for five minutes more."""
    pytest.importorskip("joblib")
    with (tmp_path / "printed").open("w") as file:  # a pipe would be waited for
        code = subprocess.run([sys.executable, "-c", LEAVES_A_WORKER], stdout=file, timeout=200).returncode
    workers = (tmp_path / "printed").read_text().split()
    assert code == 3 and len(workers) == 4
    assert not [pid for pid in workers if Path("/proc", pid).exists()]


def test_a_command_whose_reader_is_gone_goes_on_to_its_end(tmp_path):
    """As in ``quantize | head``: no traceback, and its files are written."""
    code = f"""if True:
        from pathlib import Path
        from sd_quant.errors import exit_with_its_code

        def main():
            for _ in range(3):
                print("a line" * 10000, flush=True)
            Path({str(tmp_path / "done")!r}).touch()

        exit_with_its_code(main)
    """
    ended = subprocess.run(["sh", "-c", f"{sys.executable} - | head -c 3"], input=code, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("a l", "") and (tmp_path / "done").exists()


def test_a_confined_block_has_a_time_and_a_memory_and_ends_without_a_trace():
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(TimeoutError, match="more than 0 s"), process.confined(0.2):
        while True:
            pass
    with pytest.raises(MemoryError), process.confined(60, memory=1e8):
        bytearray(10**9)
    with process.confined(60), process.confined(60, memory=1e9):
        bytearray(10**8)
    after = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    assert before == after and signal.getitimer(signal.ITIMER_PROF) == (0, 0)
