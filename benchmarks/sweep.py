"""Measures the marginal job of a sweep, and tests that a killed sweep ends with the same table as an unbroken one.

    python benchmarks/sweep.py --against <a checkout of the version before>
    python benchmarks/sweep.py --knobs quant_level=1,3 alpha=0.8 infer.steps=5

Twelve jobs on the shipped checkpoint, of which ten differ, run from an empty cache. Then the same command runs with
another empty cache, is killed with SIGKILL when half of its jobs are done, and is started again. Both tables have to
agree in every column that is no time or peak. The first job's time is from its start to its record, that of each other
from the end of the one before. The time of timing all engines together is printed too. With ``--against`` the version
in that checkout does the same sweep first, by this interpreter.

The first job includes everything that the others share, and nothing is warm but the disk's cache. The marginal job is
the median of the others, each with its own export, plan, images, latency and parity.
"""

import argparse
import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sd_quant.places import HOME, input_path
from sd_quant.report.timing import read_timing

COMMAND, KNOBS = ("quantize.py", "-m"), ("quant_level=1,2,2.5,3", "alpha=0.5,0.8,auto")
TIMES = ("_ms", "_speedup", "_speedup_low", "_speedup_high", "_time", "seconds", "memory_bytes")


def start(folder: Path, knobs: list[str], version: Path = HOME) -> subprocess.Popen:
    places = (f"cache.dir={folder}/cache", f"hydra.sweep.dir={folder}/sweep")
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *COMMAND, *knobs, *places], cwd=version, stdout=log, stderr=log, start_new_session=True
        )


def finished(folder: Path) -> list[Path]:
    return sorted((folder / "sweep").glob("*/metrics.json"), key=lambda path: path.stat().st_mtime)


def finish(folder: Path, knobs: list[str], version: Path = HOME) -> float:
    started = time.perf_counter()
    if code := start(folder, knobs, version).wait():
        sys.exit(f"the sweep failed with exit code {code}; {folder}/log says why")
    return time.perf_counter() - started


def kill_half_way(folder: Path, knobs: list[str], jobs: int) -> int:
    with start(folder, knobs) as process:
        while len(finished(folder)) < jobs // 2 and process.poll() is None:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    return len(finished(folder))


def table(folder: Path) -> list[dict]:
    with (folder / "sweep" / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def describe(version: str, folder: Path, total: float) -> None:
    """Print what the jobs of a sweep took. A job writes its provenance with its record, and that once."""
    ends = sorted(path.stat().st_mtime for path in (folder / "sweep").glob("*/provenance.json"))
    first = total - (time.time() - ends[0])
    others = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    together = sum(block["seconds"] for block in read_timing(folder / "sweep")["blocks"])
    a_job = f"{statistics.median(others):.1f} s a job ({min(others):.1f} to {max(others):.1f})"
    print(f"{version}: {len(ends)} jobs in {total:.0f} s: the first {first:.1f} s, then {a_job}", flush=True)
    print(f"timing all engines together took {together:.0f} s of that", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=input_path, default="outputs/benchmark_sweep", help="(%(default)s)")
    parser.add_argument("--knobs", nargs="+", default=KNOBS, help="of the sweep (%(default)s)")
    parser.add_argument("--against", type=input_path, help="a checkout of another version")
    options = parser.parse_args()
    before, unbroken, broken = (options.work / name for name in ("before", "unbroken", "broken"))
    for folder in (before, unbroken, broken):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    if options.against:
        total_before = finish(before, options.knobs, options.against)
        describe("before", before, total_before)
    total = finish(unbroken, options.knobs)
    describe("now", unbroken, total)
    if options.against:
        print(f"before / now: {total_before / total:.2f}", flush=True)
    jobs = len(finished(unbroken))

    done = kill_half_way(broken, options.knobs, jobs)
    rest = finish(broken, options.knobs)
    same = table(broken) == table(unbroken)
    print(f"killed with {done} jobs done, resumed in {rest:.0f} s: {'the same table' if same else 'ANOTHER TABLE'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
