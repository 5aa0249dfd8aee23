"""``python -m tests.faults.run --kills 50``: what a job leaves when it is killed, starved of disk or raced.

Each fault is put on the main job with an empty cache; then the same command is given again, undisturbed, and what it
leaves is compared with what an unbroken run left. In between nothing may lie under a final name that is not whole. A
plan is built anew with other bytes each time, so of plans the record's hash and the size count.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

from ..pipelines import TINY
from .job import PLAN, STAGES, Ended, Place, artifacts, differing, follow, leftovers, strike

CODES = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGINT: (130,), signal.SIGTERM: (130,)}
SOON = 15  # seconds that a cancelled job may take to end
SPARED = 64 * 1024  # bytes that a full disk still has for logs
MINI = ("model.path=checkpoints/sdxl_mini.nemo",)


def tiny(folder: Path) -> tuple[str, ...]:
    """The arguments for a pipeline that is made in the folder."""
    TINY["sd15"](folder / "sd15")
    return "model=sd15", f"model.path={folder}/sd15", "model.width=64", "model.height=64"


@dataclass
class Unbroken:
    """``moments``: stage to the second at which it began; ``used``: stage to the bytes on disk then."""

    artifacts: dict[str, str]
    moments: dict[str, float]
    used: dict[str, int]
    seconds: float


@dataclass
class Tally:
    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, kind: str, problems: Sequence[str]) -> None:
        self.counts[kind] += 1
        self.wrong += [f"{kind}: {problem}" for problem in problems]
        print(f"{kind}: {'; '.join(problems) or 'ok'}", flush=True)


def unbroken(place: Place) -> Unbroken:
    place.empty()
    start, moments, used = time.monotonic(), dict[str, float](), dict[str, int]()

    def note(stage: str) -> None:
        moments[stage], used[stage] = time.monotonic() - start, bytes_in(place.root)

    ended = follow(place.start(), note)
    if ended.code:
        raise SystemExit(f"the undisturbed job failed: {ended.stderr[-2000:]}")
    used["end"] = bytes_in(place.root)
    return Unbroken(artifacts(place), moments, used, time.monotonic() - start)


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


def killed_at(place: Place, stage: str, number: int) -> tuple[Ended, float]:
    """The signal is sent as the stage's line appears. Returns also the seconds from the signal to the end."""
    struck: list[float] = []

    def on_stage(begun: str) -> None:
        if begun == stage and not struck:
            struck.append(time.monotonic())
            strike(process, number)

    process = place.start()
    ended = follow(process, on_stage)
    return ended, time.monotonic() - struck[0]


def killed_after(place: Place, seconds: float, number: int) -> tuple[Ended, float]:
    process = place.start()
    timer = Timer(seconds, strike, [process, number])
    started = time.monotonic()
    timer.start()
    ended = follow(process)
    timer.cancel()
    return ended, time.monotonic() - started - seconds


def badly_refused(ended: Ended) -> list[str]:
    """What is wrong with the end of a job whose disk was full."""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    problems = []
    if ended.code != 4 or len(errors) != 1 or "disk" not in errors[0]:
        problems.append(f"ended with {ended.code}: {ended.stderr.strip()[-600:]}")
    if "Traceback" in ended.stdout + ended.stderr:
        problems.append(f"a traceback: {(ended.stdout + ended.stderr)[-600:]}")
    return problems


def whole(place: Place, expected: dict[str, str]) -> list[str]:
    """What lies under a final name and is not what an unbroken run leaves there; with a record, all has to be there."""
    found = artifacts(place)
    broken = [name for name, value in found.items() if not name.endswith(PLAN) and expected.get(name) != value]
    if (place.run / "metrics.json").exists() and (missing := sorted(expected.keys() - found.keys())):
        broken.append(f"a record of a job that was not done: {missing[0]} is missing")
    return [f"half written: {name}" for name in broken]


def resumed(place: Place, expected: dict[str, str]) -> list[str]:
    """Give the command again; what then differs from the unbroken run."""
    ended = follow(place.start())
    if ended.code:
        return [f"resuming ended with {ended.code}: {ended.stderr.strip()[-300:]}"]
    found = artifacts(place)
    problems = [f"differs: {name}" for name in differing(expected, found)]
    problems += [f"missing: {name}" for name in expected if name.endswith(PLAN) and name not in found]
    plans = json.loads((place.run / "metrics.json").read_text(encoding="utf-8"))["plans"]
    for part, report in plans.items():
        path = place.run / "plan" / f"{part}.plan"
        if path.stat().st_size != report["bytes"] or report["sha256"] != found[str(path.relative_to(place.run))]:
            problems.append(f"the record has another {path.name}")
    return problems + leftovers(place)


def strikes(
    place: Place, model: Unbroken, signals: Sequence[signal.Signals], draw: random.Random, tally: Tally
) -> None:
    """One after the other, every second as a stage begins, the others at random moments."""
    for number, sent in enumerate(signals):
        place.empty()
        if number % 2:
            seconds = draw.uniform(0, model.seconds)
            ended, after = killed_after(place, seconds, sent)
            kind = f"{sent.name} after {seconds:.1f} s, in {ended.stages[-1] if ended.stages else 'the start'}"
        else:
            stage = STAGES[number // 2 % len(STAGES)] if sent == signal.SIGKILL else draw.choice(STAGES)
            ended, after = killed_at(place, stage, sent)
            kind = f"{sent.name} as {stage} begins"
        problems = []
        if ended.code == 0:
            kind += ", too late"
        elif ended.code not in CODES[sent]:
            problems.append(f"ended with {ended.code}: {ended.stderr.strip()[-300:]}")
        else:
            problems += whole(place, model.artifacts)
        if sent != signal.SIGKILL:
            tally.slowest = max(tally.slowest, after)
            if after > SOON:
                problems.append(f"took {after:.0f} s to end")
            if "Traceback" in ended.stderr:
                problems.append(f"a traceback: {ended.stderr.strip()[-300:]}")
            problems += leftovers(place)
        tally.add(kind, problems + resumed(place, model.artifacts))


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


def full_disks(arguments: Sequence[str], model: Unbroken, stages: Sequence[str], tally: Tally) -> None:
    """As each stage begins, somebody else fills the disk but for half of what the stage is going to write."""
    with small_disk(3 * model.used["end"] // 2**20 + 64) as folder:
        place = Place(folder / "job", tuple(arguments))
        for stage in stages:
            written = model.used[(*STAGES, "end")[STAGES.index(stage) + 1]] - model.used[stage]
            place.empty()
            ended, problems = starved(place, stage, folder / "filler", max(written // 2, SPARED), model.artifacts)
            kind = f"disk full in {stage}, of {written / 1e6:.1f} MB half had room, ended in {ended.stages[-1]}"
            tally.add(kind, problems + resumed(place, model.artifacts))


def starved(place: Place, stage: str, filler: Path, spared: int, expected: dict[str, str]) -> tuple[Ended, list[str]]:
    """The job on a disk that is filled as the stage begins; afterwards there is room again."""
    ended = filled_at(place, stage, filler, spared)
    filler.unlink(missing_ok=True)
    problems = whole(place, expected) if ended.code else []
    return ended, problems + badly_refused(ended) + leftovers(place)


def filled_at(place: Place, stage: str, filler: Path, spared: int) -> Ended:
    """The job stands still while the disk is being filled."""

    def on_stage(begun: str) -> None:
        if begun == stage:
            strike(process, signal.SIGSTOP)
            free = shutil.disk_usage(place.root).free
            with filler.open("wb") as file:
                for _ in range((free - spared) // 65536):
                    file.write(b"\1" * 65536)
            strike(process, signal.SIGCONT)

    process = place.start()
    return follow(process, on_stage)


def races(places: Sequence[Place], model: Unbroken, tally: Tally) -> None:
    """Two jobs at once, of one cache; then two of one directory."""
    first, second = places
    for kind, others in (("two jobs with one cache", (first, second)), ("two jobs with one directory", (first, first))):
        for place in others:
            place.empty()
        started = [place.start(f"cache.dir={first.root}/cache") for place in others]
        ended = [follow(process) for process in started]
        problems = [f"ended with {each.code}: {each.stderr.strip()[-300:]}" for each in ended if each.code]
        for place in dict.fromkeys(others):
            problems += [f"differs: {name}" for name in differing(model.artifacts, artifacts(place))]
            problems += leftovers(place)
        tally.add(kind, problems)


def main(arguments: Sequence[str] | None = None, model_arguments: Sequence[str] = MINI) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="runs that end by SIGKILL")
    parser.add_argument("--cancels", type=int, default=8, help="runs that end by SIGINT and SIGTERM")
    parser.add_argument("--disk", nargs="*", default=["calibrate", "export", "plans", "images", "parity"],
                        help="stages in which the disk is full; the others write next to nothing")  # fmt: skip
    parser.add_argument("--races", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true", help="a pipeline that a test makes, in place of what ships")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    chosen = parser.parse_args(arguments)
    tally, start = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.tiny:
            model_arguments = tiny(Path(folder))
        places = [Place(Path(folder) / name, tuple(model_arguments)) for name in ("one", "two")]
        model = unbroken(places[0])
        print(f"unbroken: {model.seconds:.0f} s, {len(model.artifacts)} artifacts, {model.used['end'] / 1e6:.0f} MB")
        draw = random.Random(chosen.seed)
        strikes(places[0], model, [signal.SIGKILL] * chosen.kills, draw, tally)
        cancels = [(signal.SIGINT, signal.SIGTERM)[number // 2 % 2] for number in range(chosen.cancels)]
        strikes(places[0], model, cancels, draw, tally)
        if chosen.disk:
            try:
                full_disks(model_arguments, model, chosen.disk, tally)
            except PermissionError as error:
                print(f"no small disk could be mounted ({error}); full disks were not tried")
        if chosen.races:
            races(places, model, tally)
    print(f"{tally.counts.total()} faults, {len(tally.wrong)} problems, {time.monotonic() - start:.0f} s; the slowest "
          f"end of a cancelled job took {tally.slowest:.1f} s")  # fmt: skip
    for problem in tally.wrong:
        print(problem)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
