"""``python -m tests.run commands --kills 60``: every command killed at random moments, and put into hard places.

Each command is first left alone. Then it is killed, as often as is asked for in all, and given again: what it leaves
has to be what it left before, by hash, and nothing may lie under a temporary name. After that it works with 64 file
descriptors, without shared memory, with a cache from the future and the past, on a full and a read-only disk, and four
processes of it with one cache: it has to leave the same, or to end with a code from 2 to 4 (a sweep with 1) and one
sentence. With ``faketime`` (Debian's package) the clock is also set a year back and ahead while a command works.
"""

import argparse
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Timer

from .job import (
    FAST,
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
    tiny,
    whole,
)

IMAGES = ("infer.steps=2", "infer.prompts=[a rocket]")
CLOCK = "/usr/$LIB/faketime/libfaketimeMT.so.1"
DECADES = (0.0, 2.2e9)  # seconds since 1970: a clock that was never set, and one that is far ahead


def commands(folder: Path) -> list[Job]:
    """All of them, on a tiny pipeline and a run of it."""
    model = tiny(folder)
    base = main_job(folder / "base", model)
    base.empty()
    if (ended := follow(base.start())).code:
        raise SystemExit(f"the run that the others start from failed: {ended.stderr[-2000:]}")

    def command(name: str, script: str, where: str, *arguments: str, cached: bool = True) -> Job:
        root = folder / name.replace(" ", "_")
        cache = (f"cache.dir={root}/cache",) if cached else ()
        return Job(name, root, (script, *arguments, *cache, f"{where}={root}/out"))

    targets = "to=[diffusers_modelopt,onnx]"
    return [
        command("quantize", "quantize.py", "hydra.run.dir", *model, *FAST, "hand_over=[diffusers_modelopt]"),
        command("sweep", "quantize.py", "hydra.sweep.dir", "-m", *model, *FAST, "quant_level=1,3", "export_trt=none"),
        command("hand over", "hand_over.py", "hydra.run.dir", f"run={base.out}", targets),
        command("judge", "judge.py", "hydra.run.dir", *model, *IMAGES, "judge.layers=2", f"candidates=[{base.out}]"),
        command("infer", "infer.py", "out_path", f"run={base.out}", *IMAGES, "num_warmup_runs=0", cached=False),
        command("export", "export_trt.py", "infer.out_path", f"run={base.out}", "trt.targets=[SM89]",
                "trt.optimization_level=0", cached=False),
    ]  # fmt: skip


def killed(command: Job, expected: dict[str, str], seconds: float) -> tuple[str, list[str]]:
    """SIGKILL to the command and all its processes so many seconds after its start, and then the command again."""
    command.empty()
    ended = follow(command.start(), seconds=seconds)
    kind = f"{command.name}, killed after {seconds:.1f} s" + (", too late" if ended.code == 0 else "")
    return kind, whole(command, expected) + given_again(command, expected)


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


def with_clock_set(command: Job, expected: dict[str, str], years: int, seconds: float) -> list[str]:
    """The clock jumps in the middle of the ``seconds`` of the command, and back when it has three quarters behind it.

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
    moments = [Timer(seconds / 2, set_clock, [f"{years:+d}y"]), Timer(0.75 * seconds, set_clock, ["+0"])]
    for timer in moments:
        timer.start()
    found = hard(command, expected, before=before)
    for timer in moments:
        timer.cancel()
    return found


def hard_places(command: Job, expected: dict[str, str], seconds: float, tally: Tally) -> None:
    command.empty()
    tally.add(f"{command.name}, 64 file descriptors", hard(command, expected, limit=few_descriptors))
    command.empty()
    without = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh")
    tally.add(f"{command.name}, no /dev/shm", hard(command, expected, before=without))
    for years in (-1, 1) if shutil.which("faketime") else ():
        tally.add(f"{command.name}, a clock set by {years:+d} year", with_clock_set(command, expected, years, seconds))
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


def four_at_once(command: Job, expected: dict[str, str], tally: Tally) -> None:
    """Processes of one cache, each with a folder of its own."""
    command.empty()
    others = [Job(command.name, command.root / str(number), ()) for number in range(4)]
    where = command.arguments[-1].partition("=")[0]
    processes = [command.start(f"{where}={other.out}") for other in others]
    problems = [ended.told() for ended in map(follow, processes) if ended.code]
    problems += [problem for other in others for problem in differing(expected, artifacts(other))]
    tally.add(f"{command.name}, four at once on one cache", problems + leftovers(command))


def run(wanted: argparse.Namespace) -> int:
    tally, draw = Tally(), random.Random(wanted.seed)
    with tempfile.TemporaryDirectory() as folder:
        made = [command for command in commands(Path(folder)) if wanted.only is None or command.name in wanted.only]
        alone: dict[str, tuple[dict[str, str], float]] = {}
        for command in made:
            command.empty()
            begun = time.monotonic()
            if (ended := follow(command.start())).code:
                raise SystemExit(f"{command.name} failed undisturbed: {ended.stderr[-2000:]}")
            alone[command.name] = artifacts(command), time.monotonic() - begun
            print(f"{command.name}: {alone[command.name][1]:.0f} s, {len(alone[command.name][0])} files", flush=True)
        for number in range(wanted.kills):
            command = made[number % len(made)]
            expected, seconds = alone[command.name]
            tally.add(*killed(command, expected, draw.uniform(0.2, seconds)))
        if wanted.places:
            for command in made:
                hard_places(command, *alone[command.name], tally)
            four_at_once(made[0], alone[made[0].name][0], tally)
    return tally.close()
