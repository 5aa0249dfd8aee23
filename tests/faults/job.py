"""A command as a process that can be hurt: where it writes, what stage it is in, and what it leaves.

A stage begins when its line appears in the log. What is left is compared by hash: every file that a command promises is
the same in every run on one machine, but for times, sizes of memory and plans, of which it counts that they are there.
Python's hashes are not drawn anew here, because ModelOpt writes the state of its quantizers in the order of a set.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer

from sd_quant.files import TEMPORARY

from ..zoo.families import TINY

REPOSITORY = Path(__file__).parents[2]
MAIN_JOB = "main job"
STAGES = ("load", "calibrate", "assign", "images", "export", "plans", "parity", "latency")
STAGE_LINE = re.compile(rf"^[\d:]{{8}} ({'|'.join(STAGES)}) \.\.\.$")
FAST = (
    "quant_level=3", "alpha=0.8", "calib_size=2", "quantize.n_steps=2", "quantize.snapshots=[1]", "infer.steps=2",
    "infer.prompts=[a rocket]", "infer.num_timed_runs=1", "infer.num_warmup_runs=0", "timing.budget_s=0",
    "memory_of_parts=false", "trt.optimization_level=0", "trt.targets=[SM89]",
)  # fmt: skip
MOST = 600  # seconds that a command may take
PLAN = ".plan"
KEPT = (".png", ".csv", ".pt", ".safetensors", ".xml", ".bin", ".onnx", ".data", PLAN)  # what a command promises
# The report's table and its plots, which show what it recommends, and that depends on latencies.
WITH_TIMES = ("summary.csv", "pareto_latency.png", "pareto_size.png", "trajectory.png")
MEASURED = {  # or where it lies
    "latency", "seconds", "stages", "peak_memory_bytes", "environment", "overrides", "fingerprint", "plans", "knobs",
    "hand_over",
}  # fmt: skip


def tiny(folder: Path) -> tuple[str, ...]:
    """The arguments for a pipeline that is made in the folder."""
    TINY["sd15"](folder / "sd15")
    return "model=sd15", f"model.path={folder}/sd15", "model.width=64", "model.height=64"


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str
    stages: tuple[str, ...]  # that had begun

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    def told(self) -> str:
        return f"ended with {self.code}: {self.stderr.strip()[-400:]}"


@dataclass(frozen=True)
class Job:
    """``out``, ``cache`` and ``tmp`` lie in its root, so that a small disk can be put under all of them.

    What a killed process leaves in ``tmp`` is the operating system's to remove.
    """

    name: str
    root: Path
    arguments: tuple[str, ...]

    @property
    def out(self) -> Path:
        return self.root / "out"

    def empty(self) -> None:
        for path in self.root.iterdir() if self.root.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "tmp").mkdir(parents=True)

    def start(self, *more: str, before: Sequence[str] = (), limit: Callable[[], None] | None = None):
        own = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TMPDIR": f"{self.root}/tmp"}
        return subprocess.Popen(
            [*before, sys.executable, *self.arguments, *more], cwd=REPOSITORY, env=os.environ | own, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=limit,
        )  # fmt: skip


def main_job(root: Path, model: Sequence[str]) -> Job:
    where = (f"cache.dir={root}/cache", f"hydra.run.dir={root}/out")
    return Job(MAIN_JOB, root, ("quantize.py", *model, *FAST, *where))


def strike(process: subprocess.Popen, number: int) -> None:
    """The signal goes to the job and to every process that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def follow(
    process: subprocess.Popen,
    on_stage: Callable[[str], object] = lambda stage: None,
    seconds: float = MOST,
    number: int = signal.SIGKILL,
) -> Ended:
    """Read the job to its end, which a signal may hasten after some seconds; ``on_stage`` hears of stages' begins."""
    lines, stages = [], []
    limits = [Timer(seconds, strike, [process, number]), Timer(MOST, strike, [process, signal.SIGKILL])]
    errors: list[str] = []
    reader = Thread(target=lambda: errors.append(process.stderr.read()))  # a full pipe would hold the process up
    for thread in (*limits, reader):
        thread.start()
    with process:
        for line in process.stdout:
            lines.append(line)
            if found := STAGE_LINE.search(line.rstrip()):
                stages.append(found[1])
                on_stage(found[1])
        reader.join()
    for limit in limits:
        limit.cancel()
    return Ended(process.wait(), "".join(lines), errors[0], tuple(stages))


# What is left


def artifacts(job: Job) -> dict[str, str]:
    """Hashes of what a command promises, by name; of the main job's record, of what is not measured."""
    found = {}
    for path in sorted(job.out.rglob("*")):
        name = path.relative_to(job.out)
        final = path.name not in WITH_TIMES and not any(part.startswith(".") for part in name.parts)
        if final and path.is_file() and path.suffix in KEPT:
            found[str(name)] = PLAN if path.suffix == PLAN else hashlib.sha256(path.read_bytes()).hexdigest()
    record = job.out / "metrics.json"
    if job.name == MAIN_JOB and record.exists():
        content = json.loads(record.read_text(encoding="utf-8"))
        for sizes in content["sizes_bytes"].values():
            del sizes["plan"]
        told = {f"{record.name}: {key}": value for key, value in content.items() if key not in MEASURED}
        found |= {name: hashlib.sha256(json.dumps(told[name], sort_keys=True).encode()).hexdigest() for name in told}
    return found


def is_temporary(path: Path) -> bool:
    return path.suffix == ".part" or path.name.startswith(TEMPORARY)


def leftovers(job: Job) -> list[str]:
    """A sentence for each temporary name under which something is still there."""
    return [f"left over: {path.relative_to(job.root)}" for path in job.root.rglob("*") if is_temporary(path)]


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """A sentence for each name whose content is not the same on both sides."""
    names = sorted(expected.keys() | found.keys())
    return [f"differs: {name}" for name in names if expected.get(name) != found.get(name)]


def whole(job: Job, expected: dict[str, str]) -> list[str]:
    """What lies under a final name and is not what an unbroken run leaves there; with a record, all has to be there."""
    found = artifacts(job)
    broken = [name for name, value in found.items() if expected.get(name) != value]
    if (job.out / "metrics.json").exists() and (missing := sorted(expected.keys() - found.keys())):
        broken.append(f"a record of a job that was not done: {missing[0]} is missing")
    return [f"half written: {name}" for name in broken]


def given_again(job: Job, expected: dict[str, str]) -> list[str]:
    """The command undisturbed; what then differs from an unbroken run."""
    shutil.rmtree(job.root / "tmp")
    (job.root / "tmp").mkdir()
    ended = follow(job.start())
    if ended.code:
        return [f"given again it {ended.told()}"]
    return differing(expected, artifacts(job)) + leftovers(job)


@dataclass
class Tally:
    began: float = field(default_factory=time.monotonic)
    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # end of a cancelled job, in seconds

    def add(self, kind: str, problems: Sequence[str]) -> None:
        self.counts[kind] += 1
        self.wrong += [f"{kind}: {problem}" for problem in problems]
        print(f"{kind}: {'; '.join(problems) or 'ok'}", flush=True)

    def close(self) -> int:
        """The exit code, after a line of figures and one for each problem."""
        seconds = time.monotonic() - self.began
        print(f"{self.counts.total()} faults, {len(self.wrong)} problems, {seconds:.0f} s; the slowest end of a "
              f"cancelled job took {self.slowest:.1f} s", *self.wrong, sep="\n")  # fmt: skip
        return 1 if self.wrong else 0


@contextmanager
def small_disk(megabytes: int):
    """A tmpfs; PermissionError where this user may mount none."""
    folder = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    try:
        if mounted.returncode:
            raise PermissionError(mounted.stderr.strip())
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], capture_output=True)
        folder.rmdir()


def fill(file: Path, spared: int) -> None:
    """Leave so many bytes of the disk free."""
    free = shutil.disk_usage(file.parent).free
    with file.open("wb") as filler:
        for _ in range((free - spared) // 65536):
            filler.write(b"\1" * 65536)
