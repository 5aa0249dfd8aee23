"""The main job as a process that can be hurt: where it writes, what stage it is in, and what it leaves.

A stage begins when its line appears in the log. What is left is compared by hash: every file that the job promises is
the same in every run on one machine, but for times, sizes of memory and plans. Python's hashes are not drawn anew here,
because ModelOpt writes the state of its quantizers in the order of a set.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from sd_quant.files import TEMPORARY

REPOSITORY = Path(__file__).parents[2]
STAGES = ("load", "calibrate", "assign", "images", "export", "plans", "parity", "latency")
FAST = (
    "quant_level=3", "alpha=0.8", "calib_size=2", "quantize.n_steps=2", "quantize.snapshots=[1]", "infer.steps=2",
    "infer.prompts=[a rocket]", "infer.num_timed_runs=1", "infer.num_warmup_runs=0", "timing.budget_s=0",
    "memory_of_parts=false", "trt.optimization_level=0", "trt.targets=[SM89]",
)  # fmt: skip
MEASURED = {
    "latency", "seconds", "stages", "peak_memory_bytes", "environment", "overrides", "fingerprint", "plans", "knobs",
}  # fmt: skip
PLAN = ".plan"
STAGE_LINE = re.compile(rf"^[\d:]{{8}} ({'|'.join(STAGES)}) \.\.\.$")


@dataclass(frozen=True)
class Place:
    """A job's folder: ``run``, ``cache`` and ``tmp`` lie in it, so that a small disk can be put under all of them.

    What a killed process leaves in ``tmp`` is the operating system's to remove.
    """

    root: Path
    arguments: tuple[str, ...]

    @property
    def run(self) -> Path:
        return self.root / "run"

    def empty(self) -> None:
        for path in self.root.iterdir() if self.root.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "tmp").mkdir(parents=True)

    def start(self, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "quantize.py", *self.arguments, *FAST, f"cache.dir={self.root}/cache",
             f"hydra.run.dir={self.run}", *more],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "TMPDIR": str(self.root / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str
    stages: tuple[str, ...]  # that had begun


def follow(process: subprocess.Popen, on_stage: Callable[[str], object] = lambda stage: None) -> Ended:
    """Read the job to its end, at most ten minutes; ``on_stage`` hears of every stage as it begins."""
    lines, stages = [], []
    limit = Timer(600, strike, [process, signal.SIGKILL])
    limit.start()
    with process:
        for line in process.stdout:
            lines.append(line)
            if found := STAGE_LINE.search(line.rstrip()):
                stages.append(found[1])
                on_stage(found[1])
        stderr = process.stderr.read()
    limit.cancel()
    return Ended(process.wait(), "".join(lines), stderr, tuple(stages))


def strike(process: subprocess.Popen, number: int) -> None:
    """The signal goes to the job and to every process that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, number)


# The report's table and its plots, which show what it recommends, and that depends on latencies.
WITH_TIMES = ("summary.csv", "pareto_latency.png", "pareto_size.png", "trajectory.png")


def artifacts(place: Place) -> dict[str, str]:
    """Hashes of what a run promises, by name; of the record, of what is not measured."""
    found = {}
    for path in sorted(place.run.rglob("*")):
        name = str(path.relative_to(place.run))
        final = name not in WITH_TIMES and not any(part.startswith(".") for part in Path(name).parts)
        if final and path.is_file() and path.suffix in (".onnx", ".data", ".plan", ".png", ".csv", ".pt"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    record = place.run / "metrics.json"
    if record.exists():
        content = json.loads(record.read_text(encoding="utf-8"))
        for sizes in content["sizes_bytes"].values():
            del sizes["plan"]
        told = {f"{record.name}: {key}": value for key, value in content.items() if key not in MEASURED}
        found |= {name: hashlib.sha256(json.dumps(told[name], sort_keys=True).encode()).hexdigest() for name in told}
    return found


def leftovers(place: Place) -> list[str]:
    """A sentence for each temporary name under which something is still there."""
    return [f"left over: {path.relative_to(place.root)}" for path in place.root.rglob("*") if is_temporary(path)]


def is_temporary(path: Path) -> bool:
    return path.suffix == ".part" or path.name.startswith(TEMPORARY)


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names of what is not the same on both sides. A plan has other bytes each time, so none is among them."""
    names = {name for name in expected.keys() | found.keys() if not name.endswith(PLAN)}
    return sorted(name for name in names if expected.get(name) != found.get(name))
