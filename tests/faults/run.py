"""``python -m tests.run faults --kills 60``: every command killed, starved of disk, raced and put into hard places.

Each command is first left alone. Then it is killed, as often as is asked for in all, and given again: what it leaves
has to be what it left before, by hash, and nothing may lie under a temporary name; in between nothing may lie under a
final name that is not whole. A plan is built anew with other bytes each time, so of plans the record's hash and the
size count. The main job is also cancelled, and starved of disk in some stages. After that each command works with 64
file descriptors, without shared memory, with a cache from the future and the past, on a full and a read-only disk, and
four processes of one with one cache: it has to leave the same, or to end with a code from 2 to 4 (a sweep with 1) and
one sentence. With ``faketime`` (Debian's package) the clock is also set a year back and ahead while a command works.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from .job import (
    FAST,
    MAIN_JOB,
    STAGES,
    Ended,
    Job,
    Tally,
    artifacts,
    differing,
    fill,
    follow,
    given_again,
    leftovers,
    main_job,
    small_disk,
    strike,
    tiny,
    whole,
)

CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 130}
SOON = 15  # seconds that a cancelled job may take to end
SPARED = 64 * 1024  # bytes that a full disk still has for logs
MINI = ("model.path=checkpoints/sdxl_mini.nemo",)
IMAGES = ("infer.steps=2", "infer.prompts=[a rocket]")
CLOCK = "/usr/$LIB/faketime/libfaketimeMT.so.1"
DECADES = (0.0, 2.2e9)  # seconds since 1970: a clock that was never set, and one that is far ahead


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
    """``moments``: stage to the second at which it began; ``used``: stage to the bytes on disk then."""

    artifacts: dict[str, str]
    moments: dict[str, float]
    used: dict[str, int]
    seconds: float


def unbroken(job: Job) -> Unbroken:
    job.empty()
    start, moments, used = time.monotonic(), dict[str, float](), dict[str, int]()

    def note(stage: str) -> None:
        moments[stage], used[stage] = time.monotonic() - start, bytes_in(job.root)

    ended = follow(job.start(), note)
    if ended.code:
        raise SystemExit(f"{job.name} failed undisturbed: {ended.stderr[-2000:]}")
    used["end"] = bytes_in(job.root)
    found = Unbroken(artifacts(job), moments, used, time.monotonic() - start)
    print(f"{job.name}: {found.seconds:.0f} s, {len(found.artifacts)} files, {used['end'] / 1e6:.0f} MB", flush=True)
    return found


def bytes_in(folder: Path) -> int:
    """On disk, of every file once, however many names it has."""
    blocks = {}
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        blocks[found.st_ino] = found.st_blocks * 512
    return sum(blocks.values())


# Signals


def killed_at(job: Job, stage: str, number: int) -> tuple[Ended, float]:
    """The signal is sent as the stage's line appears. Returns also the seconds from the signal to the end."""
    struck: list[float] = []

    def on_stage(begun: str) -> None:
        if begun == stage and not struck:
            struck.append(time.monotonic())
            strike(process, number)

    process = job.start()
    ended = follow(process, on_stage)
    return ended, time.monotonic() - struck[0]


def resumed(job: Job, expected: dict[str, str]) -> list[str]:
    """Give the command again; what then differs from the unbroken run, or is a plan that the record does not know."""
    problems = given_again(job, expected)
    if problems or job.name != MAIN_JOB:
        return problems
    plans = json.loads((job.out / "metrics.json").read_text(encoding="utf-8"))["plans"]
    for part, report in plans.items():
        content = (job.out / "plan" / f"{part}.plan").read_bytes()
        if len(content) != report["bytes"] or report["sha256"] != hashlib.sha256(content).hexdigest():
            problems.append(f"the record has another {part}.plan")
    return problems


def struck(job: Job, model: Unbroken, sent: signal.Signals, stage: str | None, draw: random.Random, tally: Tally):
    """The signal as a stage begins or, without one, at a random moment, and then the command again."""
    job.empty()
    if stage is None:
        seconds, started = draw.uniform(0.2, model.seconds), time.monotonic()
        ended = follow(job.start(), seconds=seconds, number=sent)
        after = time.monotonic() - started - seconds
        kind = f"{job.name}, {sent.name} after {seconds:.1f} s, in {ended.stages[-1] if ended.stages else 'the start'}"
    else:
        ended, after = killed_at(job, stage, sent)
        kind = f"{job.name}, {sent.name} as {stage} begins"
    problems = []
    if ended.code == 0:
        kind += ", too late"
    else:
        problems += whole(job, model.artifacts) if ended.code == CODES[sent] else [ended.told()]
    if sent != signal.SIGKILL:
        tally.slowest = max(tally.slowest, after)
        problems += [f"took {after:.0f} s to end"] if after > SOON else []
        problems += ["a traceback"] if "Traceback" in ended.stderr else []
        problems += leftovers(job)
    tally.add(kind, problems + resumed(job, model.artifacts))


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
            tally.add(kind, problems + resumed(job, model.artifacts))


def starved(job: Job, stage: str, filler: Path, spared: int, expected: dict[str, str]) -> tuple[Ended, list[str]]:
    """The job on a disk that is filled as the stage begins, while it stands still; afterwards there is room again."""

    def on_stage(begun: str) -> None:
        if begun == stage:
            strike(process, signal.SIGSTOP)
            fill(filler, spared)
            strike(process, signal.SIGCONT)

    process = job.start()
    ended = follow(process, on_stage)
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


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def with_clock_set(command: Job, model: Unbroken, years: int) -> list[str]:
    """The clock jumps in the middle of the command, and back when it has three quarters behind it.

    Time since the machine's start goes on as it does, as when a real clock is set.
    """
    command.empty()
    rule, following = command.root / "tmp/clock", command.root / "tmp/next"

    def set_clock(offset: str) -> None:
        following.write_text(offset)
        following.replace(rule)

    set_clock("+0")
    told = {"FAKETIME_TIMESTAMP_FILE": str(rule), "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    before = ("env", "-u", "FAKETIME", *(f"{name}={value}" for name, value in told.items()), f"LD_PRELOAD={CLOCK}")
    moments = [
        Timer(share * model.seconds, set_clock, [offset]) for share, offset in ((0.5, f"{years:+d}y"), (0.75, "+0"))
    ]
    for timer in moments:
        timer.start()
    found = hard(command, model.artifacts, before=before)
    for timer in moments:
        timer.cancel()
    return found


def hard_places(command: Job, model: Unbroken, tally: Tally) -> None:
    expected = model.artifacts
    command.empty()
    tally.add(f"{command.name}, 64 file descriptors", hard(command, expected, limit=few_descriptors))
    command.empty()
    without = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh")
    tally.add(f"{command.name}, no /dev/shm", hard(command, expected, before=without))
    for years in (-1, 1) if shutil.which("faketime") else ():
        tally.add(f"{command.name}, a clock set by {years:+d} year", with_clock_set(command, model, years))
    if not any(argument.startswith("cache.dir=") for argument in command.arguments):
        return
    for moment in DECADES:
        for path in (command.root / "cache").rglob("*"):
            os.utime(path, (moment, moment))
        shutil.rmtree(command.out)
        tally.add(f"{command.name}, a cache of {time.gmtime(moment).tm_year}", hard(command, expected))
    for kind in ("full", "read-only"):
        with small_disk(200) as disk:
            command.empty()
            if kind == "full":
                fill(disk / "filler", 2**20)
            else:
                subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            found = hard(command, expected, f"cache.dir={disk}/cache")
            tally.add(f"{command.name}, a cache on a disk that is {kind}", found)


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
            turn, stages = number // len(made), [*alone[command.name].moments]
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
