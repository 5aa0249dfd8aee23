"""Measures how far several processes are faster than one at a job that they all do, by what they share.

    python benchmarks/divided.py quant_level=3 alpha=0.8 quantize.keep=5 export_trt=none "quantize.snapshots=[16]"

The same job is done from an empty cache by one process alone, and then by several at once that have another cache in
common, each on cores of its own, as on machines of their own. Calibration is divided by snapshots, images by batches,
sensitivities by layers, and files are made by one process while the others wait. Printed is what each stage took, the
longest of the processes, and the ratio. All must have the same images and sensitivities to the bit.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from sd_quant.files import sha256
from sd_quant.places import HOME, input_path
from sd_quant.process import affinity
from sd_quant.report.readings import seconds_of_stages
from sd_quant.report.record import read_record

DIVIDED = ("calibrate", "sensitivity", "images")


def start(folder: Path, number: int, cores: set[int], knobs: list[str]) -> subprocess.Popen:
    run = folder / str(number)
    places = (f"cache.dir={folder}/cache", f"hydra.run.dir={run}")
    with (folder / f"{number}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "quantize.py", *knobs, *places], cwd=HOME, stdout=log, stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": str(len(cores))}, preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )  # fmt: skip


def done(folder: Path, cores: list[set[int]], knobs: list[str]) -> dict[str, float]:
    """Let a process on each of these sets of cores do the job; returns the longest time of each stage, and of all."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    processes = [start(folder, number, each, knobs) for number, each in enumerate(cores)]
    if any([process.wait() for process in processes]):
        sys.exit(f"a process failed; the logs in {folder} say why")
    total, stages = time.perf_counter() - started, dict[str, float]()
    for number in range(len(cores)):
        for stage, seconds in seconds_of_stages(read_record(folder / str(number)) or {}).items():
            stages[stage] = max(seconds, stages.get(stage, 0.0))
    return stages | {"all": total}


def results(run: Path) -> dict[str, str]:
    """Hashes of what has to be the same."""
    files = [*run.glob("images/*/*.png"), *run.glob("sensitivity.csv"), run / "layers.csv"]
    return {str(file.relative_to(run)): sha256(file) for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("knobs", nargs="+", help="of the job")
    parser.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="of both sides, in turn (%(default)s)")
    parser.add_argument("--work", type=input_path, default="outputs/benchmark_divided", help="(%(default)s)")
    options = parser.parse_args()
    mine, count = sorted(affinity()), options.processes
    each = len(mine) // count
    if not each:
        sys.exit(f"{count} processes take {count} cores and this machine has {len(mine)}; lower --processes")
    cores = [set(mine[number * each : (number + 1) * each]) for number in range(count)]
    print(f"| stage | alone, s | {count} at once, s | ratio |\n|---|---|---|---|")
    for repeat in range(options.repeats):
        folders = alone, together = [options.work / f"{name}{repeat}" for name in ("alone", "together")]
        before, now = (
            done(folder, sets, options.knobs) for folder, sets in zip(folders, (cores[:1], cores), strict=True)
        )
        for stage in [name for name in (*DIVIDED, "all") if name in now]:
            print(
                f"| {stage} | {before[stage]:.1f} | {now[stage]:.1f} | {before[stage] / now[stage]:.2f} |", flush=True
            )
        expected = results(alone / "0")
        if any(results(together / str(number)) != expected for number in range(count)):
            sys.exit("they do not have the same results")


if __name__ == "__main__":
    main()
