"""``python -m tests.run faults --kills 50``: what a job leaves when it is killed, starved of disk or raced.

Each fault is put on the main job with an empty cache; then the same command is given again, undisturbed, and what it
leaves is compared with what an unbroken run left. In between nothing may lie under a final name that is not whole. A
plan is built anew with other bytes each time, so of plans the record's hash and the size count.
"""

import argparse
import hashlib
import json
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .job import (
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
        raise SystemExit(f"the undisturbed job failed: {ended.stderr[-2000:]}")
    used["end"] = bytes_in(job.root)
    return Unbroken(artifacts(job), moments, used, time.monotonic() - start)


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
    if problems := given_again(job, expected):
        return problems
    plans = json.loads((job.out / "metrics.json").read_text(encoding="utf-8"))["plans"]
    for part, report in plans.items():
        content = (job.out / "plan" / f"{part}.plan").read_bytes()
        if len(content) != report["bytes"] or report["sha256"] != hashlib.sha256(content).hexdigest():
            problems.append(f"the record has another {part}.plan")
    return problems


def strikes(job: Job, model: Unbroken, signals: Sequence[signal.Signals], draw: random.Random, tally: Tally) -> None:
    """One after the other, every second as a stage begins, the others at random moments."""
    for number, sent in enumerate(signals):
        job.empty()
        if number % 2:
            seconds, started = draw.uniform(0, model.seconds), time.monotonic()
            ended = follow(job.start(), seconds=seconds, number=sent)
            after = time.monotonic() - started - seconds
            kind = f"{sent.name} after {seconds:.1f} s, in {ended.stages[-1] if ended.stages else 'the start'}"
        else:
            stage = STAGES[number // 2 % len(STAGES)] if sent == signal.SIGKILL else draw.choice(STAGES)
            ended, after = killed_at(job, stage, sent)
            kind = f"{sent.name} as {stage} begins"
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


def full_disks(arguments: Sequence[str], model: Unbroken, stages: Sequence[str], tally: Tally) -> None:
    """As each stage begins, somebody else fills the disk but for half of what the stage is going to write."""
    with small_disk(3 * model.used["end"] // 2**20 + 64) as folder:
        job = main_job(folder / "job", arguments)
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


def races(jobs: Sequence[Job], model: Unbroken, tally: Tally) -> None:
    """Two jobs at once, of one cache; then two of one directory."""
    first, second = jobs
    for kind, others in (("two jobs with one cache", (first, second)), ("two jobs with one directory", (first, first))):
        for job in others:
            job.empty()
        started = [job.start(f"cache.dir={first.root}/cache") for job in others]
        ended = [follow(process) for process in started]
        problems = [each.told() for each in ended if each.code]
        for job in dict.fromkeys(others):
            problems += differing(model.artifacts, artifacts(job)) + leftovers(job)
        tally.add(kind, problems)


def run(wanted: argparse.Namespace) -> int:
    tally, draw = Tally(), random.Random(wanted.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = tiny(Path(folder)) if wanted.tiny else MINI
        jobs = [main_job(Path(folder) / name, arguments) for name in ("one", "two")]
        model = unbroken(jobs[0])
        print(f"unbroken: {model.seconds:.0f} s, {len(model.artifacts)} artifacts, {model.used['end'] / 1e6:.0f} MB")
        strikes(jobs[0], model, [signal.SIGKILL] * wanted.kills, draw, tally)
        cancels = [(signal.SIGINT, signal.SIGTERM)[number // 2 % 2] for number in range(wanted.cancels)]
        strikes(jobs[0], model, cancels, draw, tally)
        if wanted.disk:
            try:
                full_disks(arguments, model, wanted.disk, tally)
            except PermissionError as error:
                print(f"no small disk could be mounted ({error}); full disks were not tried")
        if wanted.races:
            races(jobs, model, tally)
    return tally.close()
