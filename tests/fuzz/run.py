"""``python -m tests.run fuzz --inputs 20000 --seed 0``: many damaged and hostile inputs to every reader of files.

Each reader's inputs are read in child processes with a cap on memory, some hundred in each. One seed gives the same
inputs every time on the same sources: Hypothesis draws constants from them too. An input that was neither refused nor
loaded as it is stays in ``--keep`` with the reason beside it; ``--replay FOLDER`` reads it again.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from sd_quant.process import mapped_bytes, peak_memory_bytes, reset_peak

from . import of_checkpoints, of_runs
from .harness import OTHER, REFUSED, SAME, Place, Reader, Wrong, outcome
from .of_denoisers import denoisers

CHUNK = 250  # inputs to a child
MEMORY_CAP = 2**30  # above what the child has at its start
WRONG = "anything else"
EVERY_INPUT = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}  # is tried, once


def make_readers(scratch: Path) -> list[Reader]:
    """Every reader of files that come from strangers, with their sound inputs made below ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    return [
        of_checkpoints.archives(), of_checkpoints.weights(), of_checkpoints.nemo(scratch), of_checkpoints.safetensors(),
        of_checkpoints.pipeline(scratch), of_checkpoints.observed(scratch / "observed"), of_runs.prompts(),
        of_runs.statistics(scratch), of_runs.records(), of_runs.report(), of_runs.configuration(),
        of_runs.onnx_graph(), of_runs.noise(), of_runs.lora(), of_runs.images(), of_runs.plan_record(),
        of_runs.cache_entry(), *denoisers(scratch / "denoisers"),
    ]  # fmt: skip


@dataclass
class Tally:
    counts: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    peak: int = 0

    def add(self, counts: dict[str, int], slowest: float, peak: int) -> None:
        self.counts.update(counts)
        self.slowest, self.peak = max(self.slowest, slowest), max(self.peak, peak)


Draw = Callable[[Reader, int, Path, Callable[[object], None]], None]  # gives inputs until the child ends


def drawn(reader: Reader, seed: int, folder: Path, one: Callable[[object], None]) -> None:
    """Draw inputs at random without shrinking failures, which can take minutes."""
    every = settings(max_examples=CHUNK, phases=[Phase.generate], **EVERY_INPUT)
    seeded(seed)(every(given(reader.recipes)(one)))()


def run(wanted: argparse.Namespace, draw: Draw = drawn, keep: Callable[[Reader, Path], None] | None = None) -> int:
    """``keep`` gets the folder in which ``draw`` leaves what it learns."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # they quote the inputs
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        readers = {reader.name: reader for reader in make_readers(Path(scratch) / "made")}
        if wanted.replay:
            return replay(readers, wanted.replay, Path(scratch))
        chosen = [readers[name] for name in wanted.reader or readers]
        start = time.monotonic()
        tallies = fuzz(chosen, wanted, Path(scratch), draw, keep)
    print(table(tallies))
    print(f"{time.monotonic() - start:.0f} s, seed {wanted.seed}")
    failures = sum(tally.counts[WRONG] for tally in tallies.values())
    if failures:
        print(f"{failures} inputs were neither refused nor loaded as they are; see {wanted.keep}")
    return 1 if failures else 0


def fuzz(readers: Sequence[Reader], wanted: argparse.Namespace, scratch: Path, draw: Draw, keep) -> dict[str, Tally]:
    weights = sum(reader.weight for reader in readers)
    shares = {reader.name: wanted.inputs * reader.weight // weights for reader in readers}
    shares[readers[0].name] += wanted.inputs - sum(shares.values())
    tallies = {reader.name: Tally() for reader in readers}
    for reader in readers:
        tally, learnt = tallies[reader.name], scratch / f"{reader.name}-learnt"
        learnt.mkdir()
        chunk, failed_to_start = 0, 0
        while (missing := shares[reader.name] - tally.counts.total()) > 0 and failed_to_start < 3:
            before = tally.counts.total()
            seed = zlib.crc32(f"{wanted.seed} {reader.name} {chunk}".encode())
            place = scratch / f"{reader.name}-{chunk}"
            run_chunk(reader, min(missing, CHUNK), place, wanted, tally, partial(draw, reader, seed, learnt))
            chunk += 1
            failed_to_start += tally.counts.total() == before
            done = sum(other.counts.total() for other in tallies.values())
            print(f"\r{done}/{wanted.inputs} {reader.name:<14}", end="", file=sys.stderr, flush=True)
        if keep is not None:
            keep(reader, learnt)
    print(file=sys.stderr)
    return tallies


def run_chunk(reader: Reader, count: int, root: Path, wanted: argparse.Namespace, tally: Tally, draw: Callable) -> None:
    """In a child; when that dies, as by its alarm when it hangs, the input that it was reading is what killed it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        try:
            in_child(reader, count, root, sending, wanted, draw)
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    os.close(sending)
    with open(receiving) as told:
        for kind, seconds, most in map(json.loads, told):
            tally.add({kind: 1}, seconds, most)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        tally.counts[WRONG] += 1
        preserve(root / "input", wanted.keep, f"{root.name}-died", f"the process ended with {status}, or hung")
    shutil.rmtree(root, ignore_errors=True)


def preserve(source: Path, keep: Path, name: str, reason: str) -> None:
    shutil.rmtree(keep / name, ignore_errors=True)
    shutil.copytree(source, keep / name / "input")
    (keep / name / "reason.txt").write_text(reason)
    print(f"\n{name}: {reason.splitlines()[0][:300]}", file=sys.stderr)


def in_child(reader: Reader, count: int, root: Path, sending: int, wanted: argparse.Namespace, draw: Callable) -> None:
    place, keep = Place(reader, root), wanted.keep.resolve()
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.outside)
    os.chdir(place.outside)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + MEMORY_CAP, resource.RLIM_INFINITY))
    numbers = iter(range(count))

    def read_one(recipe: object) -> None:
        number = next(numbers)
        signal.alarm(60 + round(wanted.seconds))  # which ends native code too
        told = tried(place, recipe, keep, f"{root.name}-{number}", wanted.seconds)
        os.write(sending, json.dumps(told).encode() + b"\n")
        if number + 1 == count:
            os._exit(0)  # libFuzzer counts bytes of which Hypothesis made no input too

    draw(read_one)


def tried(place: Place, recipe: object, keep: Path, name: str, limit: float) -> tuple[str, float, int]:
    """Returns the outcome of an input, its seconds and its bytes of memory. A failure is kept under the name."""
    place.put(recipe)
    reset_peak()
    base = peak_memory_bytes()
    try:
        kind, seconds = outcome(place, limit)
    except Wrong as error:
        kind, seconds = WRONG, 0.0
        preserve(place.input, keep, name, f"{error}\n\n{recipe!r}\n\n{''.join(traceback.format_exception(error))}")
        for extra in place.outside.iterdir():
            extra.unlink()
    return kind, seconds, max(0, peak_memory_bytes() - base)


def table(tallies: dict[str, Tally]) -> str:
    columns = (REFUSED, SAME, OTHER, WRONG)
    names = "".join(f"{name:>15}" for name in columns)
    header = f"{'reader':<14}{'tried':>8}{names}{'slowest, ms':>13}{'peak, MB':>10}"
    lines, total = [header, "-" * len(header)], Tally()
    for name, tally in [*tallies.items(), ("all", total)]:
        counts = "".join(f"{tally.counts[column]:>15}" for column in columns)
        times = f"{1e3 * tally.slowest:>13.0f}{tally.peak / 1e6:>10.0f}"
        lines.append(f"{name:<14}{tally.counts.total():>8}{counts}{times}")
        total.add(tally.counts, tally.slowest, tally.peak)
    return "\n".join(lines)


def replay(readers: dict[str, Reader], folder: Path, scratch: Path) -> int:
    reader = readers[folder.name.partition("-")[0]]
    place = Place(reader, scratch / "replay")
    shutil.rmtree(place.input)
    shutil.copytree(folder / "input", place.input)
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.outside)
    try:
        kind, seconds = outcome(place)
    except Wrong:
        traceback.print_exc()
        return 1
    print(f"{kind} in {1e3 * seconds:.0f} ms")
    return 0
