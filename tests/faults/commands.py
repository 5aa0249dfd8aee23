"""``python -m tests.faults.commands --kills 60``: every command killed at random moments, and put into hard places.

Each command is first left alone. Then it is killed, as often as is asked for in all, and given again: what it leaves
has to be what it left before, by hash, and nothing may lie under a temporary name. After that it works with 64 file
descriptors, without shared memory, with a cache from the future and the past, on a full and a read-only disk, and four
processes of it with one cache: it has to leave the same, or to end with a code from 2 to 4 (a sweep with 1) and one
sentence. With ``faketime`` (Debian's package) the clock is also set a year back and ahead while a command works.
"""

import argparse
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from sd_quant.files import UNFINISHED

from .job import FAST, PLAN, REPOSITORY, WITH_TIMES
from .run import Tally, small_disk, tiny

KEPT = (".png", ".csv", ".safetensors", ".xml", ".bin", ".onnx", ".data", PLAN)  # what a command promises
IMAGES = ("infer.steps=2", "infer.prompts=[a rocket]")
CLOCK = "/usr/$LIB/faketime/libfaketimeMT.so.1"
DECADES = (0.0, 2.2e9)  # seconds since 1970: a clock that was never set, and one that is far ahead


@dataclass(frozen=True)
class Command:
    """One that works in ``root / "out"`` with the cache ``root / "cache"``."""

    name: str
    root: Path
    arguments: tuple[str, ...]

    @property
    def out(self) -> Path:
        return self.root / "out"

    def empty(self) -> None:
        for folder in (self.out, self.root / "cache", self.root / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        (self.root / "tmp").mkdir()

    def start(self, *more: str, before: Sequence[str] = (), limit: Callable[[], None] | None = None):
        environment = os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(self.root / "tmp"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*before, sys.executable, *self.arguments, *more], cwd=REPOSITORY, env=environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=limit,
        )  # fmt: skip

    def left(self) -> dict[str, str]:
        """Hashes of what it promises, by name; of plans, which have other bytes each time, that they are there."""
        files = [path for path in sorted(self.out.rglob("*")) if path.is_file() and path.suffix in KEPT]
        named = {str(path.relative_to(self.out)): path for path in files if path.name not in WITH_TIMES}
        return {
            name: PLAN if path.suffix == PLAN else hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in named.items()
            if not any(part.startswith(".") for part in Path(name).parts)
        }

    def unfinished(self) -> list[str]:
        found = [path for folder in (self.out, self.root / "cache") for path in folder.rglob("*")]
        return [f"left over: {path.relative_to(self.root)}" for path in found if UNFINISHED.fullmatch(path.name)]


def commands(folder: Path) -> list[Command]:
    """All of them, on a tiny pipeline and a run of it."""
    model, base = tiny(folder), folder / "base"
    made = subprocess.run(
        [sys.executable, "quantize.py", *model, *FAST, f"cache.dir={folder}/base_cache", f"hydra.run.dir={base}"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        raise SystemExit(f"the run that the others start from failed: {made.stderr[-2000:]}")

    def command(name: str, script: str, where: str, *arguments: str, cached: bool = True) -> Command:
        root = folder / name.replace(" ", "_")
        root.mkdir()
        cache = (f"cache.dir={root}/cache",) if cached else ()
        return Command(name, root, (script, *arguments, *cache, f"{where}={root}/out"))

    targets = "to=[diffusers_modelopt,onnx]"
    return [
        command("quantize", "quantize.py", "hydra.run.dir", *model, *FAST, "hand_over=[diffusers_modelopt]"),
        command("sweep", "quantize.py", "hydra.sweep.dir", "-m", *model, *FAST, "quant_level=1,3", "export_trt=none"),
        command("hand over", "hand_over.py", "hydra.run.dir", f"run={base}", targets),
        command("judge", "judge.py", "hydra.run.dir", *model, *IMAGES, "judge.layers=2", f"candidates=[{base}]"),
        command("infer", "infer.py", "out_path", f"run={base}", *IMAGES, "num_warmup_runs=0", cached=False),
        command("export", "export_trt.py", "infer.out_path", f"run={base}", "trt.targets=[SM89]",
                "trt.optimization_level=0", cached=False),
    ]  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str]:
    try:
        _, stderr = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, "it was still there after ten minutes"
    return process.returncode, stderr


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return [f"differs: {name}" for name in names]


def given_again(command: Command, expected: dict[str, str]) -> list[str]:
    """The command undisturbed; what then differs from the first time."""
    code, stderr = ended(command.start())
    if code:
        return [f"given again it ended with {code}: {stderr.strip()[-300:]}"]
    return differing(expected, command.left()) + command.unfinished()


def killed(command: Command, expected: dict[str, str], seconds: float) -> tuple[str, list[str]]:
    """SIGKILL to the command and all its processes so many seconds after its start, and then the command again."""
    command.empty()
    process = command.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    code, _ = ended(process)
    kind = f"{command.name}, killed after {seconds:.1f} s" + (", too late" if code == 0 else "")
    broken = {name: value for name, value in command.left().items() if expected.get(name) != value}
    return kind, [f"half written: {name}" for name in broken] + given_again(command, expected)


def hard(command: Command, expected: dict[str, str], *more: str, **place) -> list[str]:
    """In a hard place: the same is left, or the end is one sentence, and without the place the same is left."""
    code, stderr = ended(command.start(*more, **place))
    if code == 0:
        return differing(expected, command.left()) + command.unfinished()
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    least = 1 if command.name == "sweep" else 2  # a sweep of which a job has failed ends with 1
    problems = [] if least <= code <= 4 and len(errors) == 1 else [f"ended with {code}: {stderr.strip()[-400:]}"]
    problems += ["a traceback"] if "Traceback" in stderr else []
    print(f"  refused with {code}: {' '.join(errors)[:150]}", flush=True)
    return problems + given_again(command, expected)


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def with_clock_set(command: Command, expected: dict[str, str], years: int, seconds: float) -> list[str]:
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


def hard_places(command: Command, expected: dict[str, str], seconds: float, tally: Tally) -> None:
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
    with small_disk(200) as disk:
        command.empty()
        with (disk / "filler").open("wb") as filler:
            for _ in range(199 * 16):
                filler.write(b"\1" * 65536)
        tally.add(f"{command.name}, a cache on a full disk", hard(command, expected, f"cache.dir={disk}/cache"))
    with small_disk(200) as disk:
        command.empty()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        tally.add(f"{command.name}, a cache that is read-only", hard(command, expected, f"cache.dir={disk}/cache"))


def four_at_once(command: Command, expected: dict[str, str], tally: Tally) -> None:
    """Processes of one cache, each with a folder of its own."""
    command.empty()
    others = [Command(f"{number}", command.root / str(number), ()) for number in range(4)]
    where = command.arguments[-1].partition("=")[0]
    processes = [command.start(f"{where}={other.out}") for other in others]
    problems = [f"ended with {code}: {stderr[-300:]}" for code, stderr in map(ended, processes) if code]
    problems += [problem for other in others for problem in differing(expected, other.left())]
    tally.add(f"{command.name}, four at once on one cache", problems + command.unfinished())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.commands", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=60, help="in all")
    parser.add_argument("--places", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands, such as judge and 'hand over'")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    chosen = parser.parse_args(arguments)
    tally, start, draw = Tally(), time.monotonic(), random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        made = [command for command in commands(Path(folder)) if chosen.only is None or command.name in chosen.only]
        alone: dict[str, tuple[dict[str, str], float]] = {}
        for command in made:
            command.empty()
            begun = time.monotonic()
            code, stderr = ended(command.start())
            if code:
                raise SystemExit(f"{command.name} failed undisturbed: {stderr[-2000:]}")
            alone[command.name] = command.left(), time.monotonic() - begun
            print(f"{command.name}: {alone[command.name][1]:.0f} s, {len(alone[command.name][0])} files", flush=True)
        for number in range(chosen.kills):
            command = made[number % len(made)]
            expected, seconds = alone[command.name]
            tally.add(*killed(command, expected, draw.uniform(0.2, seconds)))
        if chosen.places:
            for command in made:
                hard_places(command, *alone[command.name], tally)
            four_at_once(made[0], alone[made[0].name][0], tally)
    print(f"{tally.counts.total()} faults, {len(tally.wrong)} problems, {time.monotonic() - start:.0f} s")
    for problem in tally.wrong:
        print(problem)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
