"""``python3.11 -m tests.cadence.ci``: what continuous integration runs, in forty minutes on two quiet cores.

First ``make test``. Then, of the nightly and release cases, those that the change touches (tests/cadence/touched.py),
and of the other nightly ones a sixth, another each day, so that all have run within a week. What does not fit into the
limit, by the recorded seconds (benchmarks/results/test_seconds.tsv) and by how fast ``make test`` was here, is left out
and named. A part that is still running after 45 minutes is stopped, and the run has failed. The standard library alone
is used: nothing is installed when it starts.

The change is what lies between HEAD and ``--base``, or $CI_BASE; without either, the newest commit that is four hours
older than HEAD, which is longer than a session of work.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from .seconds import HOME, RECORD, RUNS, SECONDS, Seconds, cases_of, change, read, sums, write
from .touched import UnknownPath, touched

LIMIT, STOP = 40 * 60, 45 * 60  # seconds
COMMIT_GOAL = 7 * 60  # seconds that make test should take
DAYS = 6  # in which all nightly cases run
NEW = 20.0  # seconds that are taken for a file that is not on record
PAUSE = "4 hours ago"


@dataclass(frozen=True)
class Part:
    """A target of make, which takes FILES. ``files`` matches text and path of the files whose cases it has."""

    workers: int
    setup: int  # seconds before its first case: what it installs, and imports
    marks: str
    below: str = ""


PARTS = {
    "soak-tests": Part(2, 20, r"mark\.nightly\b"),
    "soak-consumers": Part(2, 120, r"mark\.consumer\b"),
    "release-tests": Part(2, 20, r"mark\.release\b"),
    "release-benchmarks": Part(2, 90, r"mark\.release\b", "tests/unit/benchmarks/"),
    "cluster-check": Part(1, 60, r"mark\.release\b", "tests/cli/cluster/"),
}
Piece = tuple[str, str]  # a part and a file
NEEDS = {"tests/cli/cluster/test_slurm.py": "slurmctld"}  # a program without which all cases of a file skip


def pieces() -> list[Piece]:
    """Each file that has nightly or release cases, with the part that runs them."""
    special = [part.below for part in PARTS.values() if part.below]
    found = []
    for path in sorted((HOME / "tests").rglob("test_*.py")):
        file, text = path.relative_to(HOME).as_posix(), path.read_text(encoding="utf-8")
        home = next((below for below in special if file.startswith(below)), "")
        found += [(name, file) for name, part in PARTS.items() if part.below == home and re.search(part.marks, text)]
    return found


def changed_since(base: str | None) -> list[str] | None:
    """Paths that differ from that revision, or are not tracked; None where there is no revision to compare with."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HOME, capture_output=True, text=True).stdout.strip()

    head = git("log", "-1", "--format=%ct")
    base = base or (git("rev-list", "-1", f"--before={int(head) - 4 * 3600}", "HEAD") if head else "")
    if not base:
        return None
    print(f"the change: since {git('log', '-1', '--format=%h %cI %s', base)}")
    listed = [git("diff", "--name-only", base), git("ls-files", "--others", "--exclude-standard")]
    return sorted({path for each in listed for path in each.splitlines()})


def expected(piece: Piece, record: Seconds) -> float:
    """Wall seconds of a file's cases on the class of machine of the record."""
    return record.get(piece, NEW) / PARTS[piece[0]].workers


def turn_of(rest: Iterable[Piece], record: Seconds, day: int) -> list[Piece]:
    """The nightly pieces whose turn it is: the longest go first, each to the day that has the least so far."""
    days: list[list[Piece]] = [[] for _ in range(DAYS)]
    for piece in sorted(rest, key=lambda piece: (-expected(piece, record), piece)):
        min(days, key=lambda pieces: sum(expected(each, record) for each in pieces)).append(piece)
    return days[day % DAYS]


def chosen(wanted: Sequence[Piece], record: Seconds, scale: float, seconds: float) -> tuple[list[Piece], list[Piece]]:
    """Which of the pieces fit into the seconds, in their order, and which do not."""
    taken: list[Piece] = []
    for piece in wanted:
        setup = 0 if any(part == piece[0] for part, _ in taken) else PARTS[piece[0]].setup
        if (cost := setup + expected(piece, record) * scale) <= seconds:
            taken.append(piece)
            seconds -= cost
    return taken, [piece for piece in wanted if piece not in taken]


class Run:
    """What has run so far: seconds by part, cases, and which parts have failed."""

    def __init__(self, folder: Path):
        self.folder, self.began = folder, time.monotonic()
        self.took: dict[str, float] = {}
        self.failed: list[str] = []
        self.cases: list[tuple[str, str, float]] = []
        self.seconds: Seconds = {}

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def make(self, target: str, *arguments: str) -> None:
        """Runs a target of make, for as long as is left until STOP."""
        print(f"\n=== {target}, after {self.elapsed():.0f} s", flush=True)
        junit, began = self.folder / f"{target}.xml", time.monotonic()
        added = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={junit}"
        process = subprocess.Popen(
            ["make", target, *arguments], cwd=HOME, env=os.environ | {"PYTEST_ADDOPTS": added}, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, STOP - self.elapsed()))
        except subprocess.TimeoutExpired:
            code = 1
            print(f"=== {target} is stopped: it was still running after {STOP // 60} minutes", flush=True)
        finally:  # what it has started too, which Ctrl-C would not reach
            for sent in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, sent)
                    time.sleep(1)
                except ProcessLookupError:
                    break
            process.wait()
        self.took[target] = time.monotonic() - began
        self.failed += [target] if code else []
        cases = cases_of(junit)
        self.cases += cases
        self.seconds |= sums(target, cases)
        write(self.folder / SECONDS, self.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3.11 -m tests.cadence.ci", description=__doc__)
    parser.add_argument("--base", default=os.environ.get("CI_BASE"), help="the revision that the change is made on")
    parser.add_argument("--day", type=int, default=date.today().toordinal(), help="whose turn of the nightly cases")
    parser.add_argument("--plan", action="store_true", help="say what would run after make test, and run nothing")
    options = parser.parse_args(arguments)

    changed, everything, record = changed_since(options.base), pieces(), read(RECORD)
    try:
        files = touched(changed, [file for _, file in everything]) if changed is not None else everything
    except UnknownPath as error:
        print(error)
        return 1
    present = [piece for piece in everything if piece[1] not in NEEDS or shutil.which(NEEDS[piece[1]])]
    by_change = [piece for piece in present if changed is None or piece[1] in files]
    by_change.sort(key=lambda piece: (not piece[0].startswith("nightly"), expected(piece, record)))
    rest = [piece for piece in present if piece not in by_change and piece[0].startswith("nightly")]
    wanted = [*by_change, *turn_of(rest, record, options.day)]

    run, scale = Run(RUNS / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")), 1.0
    if not options.plan:
        run.make("test")
        recorded = sum(record.get(("test", file), 0.0) for _, file in run.seconds)
        scale = sum(run.seconds.values()) / recorded if recorded else 1.0
    taken, left_out = chosen(wanted, record, scale, LIMIT - run.elapsed())
    print(f"touched: {len(by_change)} long files; run: {len(taken)} of {len(wanted)}, at {scale:.2f}x their record")
    for name in PARTS if not options.plan else ():
        own = sorted((piece for piece in taken if piece[0] == name), key=lambda piece: -expected(piece, record))
        if own:  # the longest first, so that both workers end at about the same time
            run.make(name, f"FILES={' '.join(file for _, file in own)}")
    return report(run, record, left_out, [piece for piece in everything if piece not in wanted])


def report(run: Run, record: Seconds, left_out: Sequence[Piece], others: Sequence[Piece]) -> int:
    print("\n=== what took how long")
    for name, seconds in run.took.items():
        print(f"{seconds:7.0f} s  {name}{' FAILED' if name in run.failed else ''}")
    print(f"{run.elapsed():7.0f} s  in all, of {LIMIT} s")
    if "test" in run.took:
        print(f"make test took {run.took['test']:.0f} s, install and all; it may take {COMMIT_GOAL} s on quiet cores")
    print("\nthe ten slowest cases")
    for file, case, seconds in sorted(run.cases, key=lambda case: -case[2])[:10]:
        print(f"{seconds:7.1f} s  {file}::{case}")
    if record and run.seconds:
        print("\nsince the record", *change(record, run.seconds, rows=5), sep="\n")
    if left_out:
        print(f"\nleft out for time, {len(left_out)} files (CI_BASE=<revision> narrows the change):")
        print("\n".join(f"{record.get(piece, NEW):7.0f} s  {piece[0]} {piece[1]}" for piece in left_out))
    rest = sum(record.get(piece, NEW) for piece in others)
    print(f"\nnot touched, and not this day's turn: {len(others)} files, {rest:.0f} s")
    if run.failed:
        print(f"failed: {' '.join(run.failed)}")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
