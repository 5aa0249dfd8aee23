"""``python -m tests.run faults --kills 60``: every command killed, starved of disk, raced and put into hard places.

Each command is first left alone. Whatever befalls it then, the same command given again has to leave what it left
before, by hash and without a temporary name; in between nothing may lie under a final name that is not whole. Of plans,
which are built with other bytes each time, the record's hash and the size count. In a hard place (few file
descriptors, no shared memory, an old cache or one on a full disk, with ``faketime`` a clock that is set) a command may
also end with a code from 2 to 4 (a sweep with 1) and one sentence.

A stage begins when its line appears in the log. Python's hashes are not drawn anew here, because ModelOpt writes the
state of its quantizers in the order of a set.
"""

import argparse
import hashlib
import json
import os
import random
import re
import resource
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
from threading import Timer

from sd_quant.files import TEMPORARY

from ..zoo.families import TINY

REPOSITORY = Path(__file__).parents[2]
MAIN_JOB = "main job"
STAGES = ("load", "calibrate", "assign", "images", "export", "plans", "parity", "latency")
STAGE_LINE = re.compile(rf"^[\d:]{{8}} ({'|'.join(STAGES)}) \.\.\.$")
FAST = (
    "quant_level=3", "alpha=0.8", "calib_size=2", "quantize.n_steps=2", "quantize.snapshots=[1]", "infer.steps=2",
    "infer.prompts=[a rocket]", "infer.num_timed_runs=1", "infer.num_warmup_runs=0", "timing.budget_s=0",
    "trt.optimization_level=0", "trt.targets=[SM89]",
)  # fmt: skip
MOST = 600  # seconds that a command may take
PLAN = ".plan"
KEPT = (".png", ".csv", ".pt", ".safetensors", ".xml", ".bin", ".onnx", ".data", PLAN)  # what a command promises
WITH_TIMES = ("summary.csv", "pareto_latency.png", "pareto_size.png", "trajectory.png")  # show what is recommended
MEASURED = {*"latency seconds stages peak_memory_bytes environment overrides fingerprint plans knobs hand_over".split()}
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 130}
SOON = 15  # seconds that a cancelled job may take to end
SPARED = 64 * 1024  # bytes that a full disk still has for logs
MINI = ("model.path=checkpoints/sdxl_mini.nemo",)
IMAGES = ("infer.steps=2", "infer.prompts=[a rocket]")
CLOCK = "/usr/$LIB/faketime/libfaketimeMT.so.1"
DECADES = (0.0, 2.2e9)  # seconds since 1970: a clock that was never set, and one that is far ahead


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
    """``out``, ``cache`` and ``tmp`` lie in its root, so that a small disk can be put under all of them. What a killed
    process leaves in ``tmp`` is the operating system's to remove."""

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
        errors = tempfile.TemporaryFile("w+")  # a full pipe would hold the process up
        process = subprocess.Popen(
            [*before, sys.executable, *self.arguments, *more], cwd=REPOSITORY, env=os.environ | own, text=True,
            stdout=subprocess.PIPE, stderr=errors, start_new_session=True, preexec_fn=limit,
        )  # fmt: skip
        process.errors = errors
        return process


def main_job(root: Path, model: Sequence[str]) -> Job:
    where = (f"cache.dir={root}/cache", f"hydra.run.dir={root}/out")
    return Job(MAIN_JOB, root, ("quantize.py", *model, *FAST, *where))


def strike(process: subprocess.Popen, number: int) -> None:
    """The signal goes to the job and to every process that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def follow(process: subprocess.Popen, on_stage: Callable[[str], object] = lambda stage: None) -> Ended:
    """Read the job to its end; ``on_stage`` hears of stages' begins."""
    lines, stages, limit = [], [], Timer(MOST, strike, [process, signal.SIGKILL])
    limit.start()
    with process, process.errors:
        for line in process.stdout:
            lines.append(line)
            if found := STAGE_LINE.search(line.rstrip()):
                stages.append(found[1])
                on_stage(found[1])
        code = process.wait()
        limit.cancel()
        process.errors.seek(0)
        return Ended(code, "".join(lines), process.errors.read(), tuple(stages))


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
        told = {name: json.dumps(content[name], sort_keys=True) for name in content.keys() - MEASURED}
        found |= {f"{record.name}: {key}": hashlib.sha256(text.encode()).hexdigest() for key, text in told.items()}
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
    """Run the command undisturbed; list differences from an unbroken run, and plans that the record does not name."""
    shutil.rmtree(job.root / "tmp")
    (job.root / "tmp").mkdir()
    ended = follow(job.start())
    if ended.code:
        return [f"given again it {ended.told()}"]
    problems = differing(expected, artifacts(job)) + leftovers(job)
    if problems or job.name != MAIN_JOB:
        return problems
    plans = json.loads((job.out / "metrics.json").read_text(encoding="utf-8"))["plans"]
    written = {part: (job.out / "plan" / f"{part}.plan").read_bytes() for part in plans}
    known = {part: (len(content), hashlib.sha256(content).hexdigest()) for part, content in written.items()}
    return [
        f"the record has another {part}.plan"
        for part, report in plans.items()
        if known[part] != (report["bytes"], report["sha256"])
    ]


@dataclass
class Tally:
    began: float = field(default_factory=time.monotonic)
    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, problems: Sequence[str]) -> None:
        self.counts[kind] += 1
        self.wrong += [f"{kind}: {problem}" for problem in problems]
        print(f"{kind}: {'; '.join(problems) or 'ok'}", flush=True)

    def close(self) -> int:
        """The exit code, after a line of figures and one for each problem."""
        seconds = time.monotonic() - self.began
        print(f"{self.counts.total()} faults, {len(self.wrong)} problems, {seconds:.0f} s", *self.wrong, sep="\n")
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


# The commands


def commands(folder: Path, model: Sequence[str]) -> list[Job]:
    """All of them, on a pipeline and a run of it."""
    base = main_job(folder / "base", model)
    unbroken(base)

    def command(name: str, script: str, where: str, *arguments: str, cached: bool = True) -> Job:
        root = folder / name.replace(" ", "_")
        cache = (f"cache.dir={root}/cache",) if cached else ()
        return Job(name, root, (script, *arguments, *cache, f"{where}={root}/out"))

    targets = "to=[diffusers_modelopt,onnx]"
    return [
        command(MAIN_JOB, "quantize.py", "hydra.run.dir", *model, *FAST, "hand_over=[diffusers_modelopt]"),
        command("sweep", "quantize.py", "hydra.sweep.dir", "-m", *model, *FAST, "quant_level=1,3", "export_trt=none"),
        command("hand over", "hand_over.py", "hydra.run.dir", f"run={base.out}", targets),
        command("judge", "judge.py", "hydra.run.dir", *model, *IMAGES, "judge.layers=2", f"candidates=[{base.out}]"),
        command("infer", "infer.py", "out_path", f"run={base.out}", *IMAGES, "num_warmup_runs=0", cached=False),
        command("export", "export_trt.py", "infer.out_path", f"run={base.out}", "trt.targets=[SM89]",
                "trt.optimization_level=0", cached=False),
    ]  # fmt: skip


@dataclass
class Unbroken:
    """``used``: the bytes on disk as each stage began, and at the end."""

    artifacts: dict[str, str]
    used: dict[str, int]
    seconds: float


def unbroken(job: Job) -> Unbroken:
    job.empty()
    start, used = time.monotonic(), dict[str, int]()

    def note(stage: str) -> None:
        used[stage] = shutil.disk_usage(job.root).used

    ended = follow(job.start(), note)
    if ended.code:
        raise SystemExit(f"{job.name} failed undisturbed: {ended.stderr[-2000:]}")
    note("end")
    found = Unbroken(artifacts(job), used, time.monotonic() - start)
    print(f"{job.name}: {found.seconds:.0f} s, {len(found.artifacts)} files", flush=True)
    return found


# Signals


def disturbed(job: Job, moment: str | float, act: Callable[[subprocess.Popen], object]) -> tuple[Ended, float]:
    """Act on the job as a stage's line appears in its log, or after some seconds; return the seconds from then to its
    end as well."""
    acted, process = list[float](), job.start()

    def now() -> None:
        if not acted:  # a sweep has each stage several times
            acted.append(time.monotonic())
            act(process)

    timer = Timer(moment if isinstance(moment, float) else MOST, now)
    timer.start()
    ended = follow(process, lambda begun: now() if begun == moment else None)
    timer.cancel()
    return ended, time.monotonic() - acted[0] if acted else 0.0


def struck(job: Job, model: Unbroken, sent: signal.Signals, stage: str | None, draw: random.Random, tally: Tally):
    """The signal as a stage begins or, without one, at a random moment, and then the command again."""
    job.empty()
    moment = stage or draw.uniform(0.2, model.seconds)
    ended, after = disturbed(job, moment, lambda process: strike(process, sent))
    where = ended.stages[-1] if ended.stages else "the start"
    when = f"as {stage} begins" if stage else f"after {moment:.1f} s, in {where}"
    kind = f"{job.name}, {sent.name} {when}"
    problems = []
    if ended.code == 0:
        kind += ", too late"
    else:
        problems += whole(job, model.artifacts) if ended.code == CODES[sent] else [ended.told()]
    if sent != signal.SIGKILL:
        problems += [f"took {after:.0f} s to end"] if after > SOON else []
        problems += ["a traceback"] if "Traceback" in ended.stderr else []
        problems += leftovers(job)
    tally.add(kind, problems + given_again(job, model.artifacts))


# Disks


def full_disks(arguments: Sequence[str], stages: Sequence[str], tally: Tally) -> None:
    """As each stage begins, somebody else fills the disk but for half of what the stage is going to write."""
    with small_disk(1024) as folder:
        job = main_job(folder / "job", arguments)
        model = unbroken(job)
        for stage in stages:
            written = model.used[(*STAGES, "end")[STAGES.index(stage) + 1]] - model.used[stage]
            job.empty()
            ended, problems = starved(job, stage, folder / "filler", max(written // 2, SPARED), model.artifacts)
            kind = f"disk full in {stage}, of {written / 1e6:.1f} MB half had room, ended in {ended.stages[-1]}"
            tally.add(kind, problems + given_again(job, model.artifacts))


def starved(job: Job, stage: str, filler: Path, spared: int, expected: dict[str, str]) -> tuple[Ended, list[str]]:
    """The job on a disk that is filled as the stage begins, while it stands still; afterwards there is room again."""

    def act(process: subprocess.Popen) -> None:
        strike(process, signal.SIGSTOP)
        fill(filler, spared)
        strike(process, signal.SIGCONT)

    ended, _ = disturbed(job, stage, act)
    filler.unlink(missing_ok=True)
    problems = whole(job, expected) if ended.code else []
    if ended.code != 4 or len(ended.errors) != 1 or "disk" not in ended.errors[0]:
        problems.append(ended.told())
    if "Traceback" in ended.stdout + ended.stderr:
        problems.append(f"a traceback: {(ended.stdout + ended.stderr)[-600:]}")
    return ended, problems + leftovers(job)


# Hard places


def hard(command: Job, expected: dict[str, str], *more: str, **place) -> list[str]:
    """In a hard place: the same is left, or the end is one sentence, and without the place the same is left."""
    ended = follow(command.start(*more, **place))
    if ended.code == 0:
        return differing(expected, artifacts(command)) + leftovers(command)
    least = 1 if command.name == "sweep" else 2  # a sweep of which a job has failed ends with 1
    problems = [] if least <= ended.code <= 4 and len(ended.errors) == 1 else [ended.told()]
    problems += ["a traceback"] if "Traceback" in ended.stderr else []
    print(f"  refused with {ended.code}: {' '.join(ended.errors)[:150]}", flush=True)
    return problems + given_again(command, expected)


def with_clock_set(command: Job, model: Unbroken, years: int) -> list[str]:
    """The clock jumps in the middle of the command, and back when it has three quarters behind it; time since the
    machine's start goes on as it does, as when a real clock is set."""
    command.empty()
    rule, following = command.root / "tmp/clock", command.root / "tmp/next"

    def set_clock(offset: str) -> None:
        following.write_text(offset)
        following.replace(rule)

    set_clock("+0")
    told = {"FAKETIME_TIMESTAMP_FILE": str(rule), "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    before = ("env", "-u", "FAKETIME", *(f"{name}={value}" for name, value in told.items()), f"LD_PRELOAD={CLOCK}")
    jumps = {0.5: f"{years:+d}y", 0.75: "+0"}  # by the share of the command's time
    timers = [Timer(share * model.seconds, set_clock, [offset]) for share, offset in jumps.items()]
    for timer in timers:
        timer.start()
    found = hard(command, model.artifacts, before=before)
    for timer in timers:
        timer.cancel()
    return found


def hard_places(command: Job, model: Unbroken, tally: Tally) -> None:
    def tried(place: str, *more: str, anew: bool = True, **how) -> None:
        if anew:
            command.empty()
        tally.add(f"{command.name}, {place}", hard(command, model.artifacts, *more, **how))

    tried("64 file descriptors", limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    without = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh")
    tried("no /dev/shm", before=without)
    for years in (-1, 1) if shutil.which("faketime") else ():
        tally.add(f"{command.name}, a clock set by {years:+d} year", with_clock_set(command, model, years))
    if not any(argument.startswith("cache.dir=") for argument in command.arguments):
        return
    for moment in DECADES:
        for path in (command.root / "cache").rglob("*"):
            os.utime(path, (moment, moment))
        shutil.rmtree(command.out)
        tried(f"a cache of {time.gmtime(moment).tm_year}", anew=False)
    for kind in ("full", "read-only"):
        with small_disk(200) as disk:
            if kind == "full":
                fill(disk / "filler", 2**20)
            else:
                subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            tried(f"a cache on a disk that is {kind}", f"cache.dir={disk}/cache")


def races(command: Job, model: Unbroken, tally: Tally) -> None:
    """Four processes of one cache, each with a folder of its own; then two of one folder."""
    where = command.arguments[-1].partition("=")[0]
    for kind, outs in (("four at once on one cache", range(4)), ("two at once in one folder", (0, 0))):
        command.empty()
        others = [Job(command.name, command.root / str(number), ()) for number in outs]
        processes = [command.start(f"{where}={other.out}") for other in others]
        problems = [ended.told() for ended in map(follow, processes) if ended.code]
        problems += [problem for other in others for problem in differing(model.artifacts, artifacts(other))]
        tally.add(f"{command.name}, {kind}", problems + leftovers(command))


def run(wanted: argparse.Namespace) -> int:
    tally, draw = Tally(), random.Random(wanted.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = MINI if wanted.shipped else tiny(Path(folder))
        made = [each for each in commands(Path(folder), model) if wanted.only is None or each.name in wanted.only]
        alone = {command.name: unbroken(command) for command in made}
        signals = [signal.SIGKILL] * wanted.kills
        signals += [(signal.SIGINT, signal.SIGTERM)[number % 2] for number in range(wanted.cancels)]
        for number, sent in enumerate(signals):
            command = made[number % len(made) if sent == signal.SIGKILL else 0]
            turn, stages = number // len(made), [*alone[command.name].used][:-1]
            stage = stages[turn // 2 % len(stages)] if stages and turn % 2 else None
            struck(command, alone[command.name], sent, stage, draw, tally)
        if wanted.disk:
            try:
                full_disks(model, wanted.disk, tally)
            except PermissionError as error:
                print(f"no small disk could be mounted ({error}); full disks were not tried")
        if wanted.races:
            races(made[0], alone[made[0].name], tally)
        for command in made if wanted.places else ():
            hard_places(command, alone[command.name], tally)
    return tally.close()
