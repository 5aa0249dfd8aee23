"""``python3.11 -m tests.cadence.ci``: what continuous integration runs, in forty minutes on two quiet cores.

First ``make test``. Then, of the nightly and release cases, those that the change touches (tests/cadence/touched.py),
and of the other nightly ones a sixth, another each day. Each part has a share of the time that is left, by its recorded
seconds (benchmarks/results/test_seconds.tsv); the cases that it has not begun by then are left out and named. A part
that is still running after 45 minutes is stopped, and the run has failed. The standard library alone is used: nothing
is installed when it starts.

The change is what lies between HEAD and ``--base``, or $CI_BASE; without either, the newest commit that is four hours
older than HEAD, which is longer than a session of work.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path

from .seconds import HOME, RECORD, RUNS, SECONDS, Case, Seconds, cases_of, change, read, sums, write
from .touched import UnknownPath, touched

# Seconds. A part stops early, and make test, without which nothing is known, on a machine that is several times slower.
LIMIT, STOP, TEST_STOP = 40 * 60, 45 * 60, 80 * 60
COMMIT_GOAL = 7 * 60  # that the commit cases should take on two quiet cores with VNNI
NEW = 20.0  # that are taken for a file that is not on record
LAST_CASES = 180  # that the cases take which are running when their part may begin no more
FAULTS = 300  # for deliberate faults in what the change touches
DAYS = 6  # in which all nightly cases run


@dataclass(frozen=True)
class Part:
    """A target of make, which takes FILES: those below a folder whose text has a match of ``mark``."""

    mark: str
    workers: int = 2
    setup: int = 20  # seconds before its first case: what it installs, and imports
    below: str = ""  # of several parts that a file is below, the one with a folder


PARTS = {
    "soak-tests": Part(r"mark\.nightly\b"),
    "soak-consumers": Part(r"mark\.consumer\b", setup=90),
    "release-tests": Part(r"mark\.release\b"),
    "release-benchmarks": Part(r"mark\.release\b", setup=60, below="tests/unit/benchmarks/"),
    "cluster-check": Part(r"mark\.release\b", workers=1, setup=60, below="tests/cli/cluster/"),
}
Piece = tuple[str, str]  # a part and a file
NEEDS = {"tests/cli/cluster/test_slurm.py": "slurmctld"}  # a program without which all cases of a file skip


def pieces() -> list[Piece]:
    """Each file that has nightly or release cases, with the part that runs them."""
    special = [part.below for part in PARTS.values() if part.below]
    found = []
    for path in sorted([*(HOME / "addons").rglob("test_*.py"), *(HOME / "tests").rglob("test_*.py")]):
        file, text = path.relative_to(HOME).as_posix(), path.read_text(encoding="utf-8")
        home = next((below for below in special if file.startswith(below)), "")
        found += [(name, file) for name, part in PARTS.items() if part.below == home and re.search(part.mark, text)]
    return found


def git(*arguments: str, check: bool = False) -> str:
    return subprocess.run(["git", *arguments], cwd=HOME, check=check, capture_output=True, text=True).stdout.strip()


def base_of_head() -> str:
    """The newest commit that is four hours older than HEAD; nothing where there is none."""
    head = git("log", "-1", "--format=%ct")
    return git("rev-list", "-1", f"--before={int(head) - 4 * 3600}", "HEAD") if head else ""


def changed_since(base: str) -> list[str]:
    """Paths that differ from that revision, or are not tracked."""
    print(f"the change: since {git('log', '-1', '--format=%h %cI %s', base)}")
    listed = [git("diff", "--name-only", base, check=True), git("ls-files", "--others", "--exclude-standard")]
    return sorted({path for each in listed for path in each.splitlines()})


def expected(piece: Piece, record: Seconds) -> float:
    """Wall seconds of a file's cases on the class of machine of the record."""
    return record.get(piece, NEW) / PARTS[piece[0]].workers


def turn_of(nightly: Iterable[Piece], record: Seconds, day: int) -> list[Piece]:
    """The nightly pieces whose turn it is: the longest go first, each to the day that has the least so far.

    All nightly pieces are divided, those that the change touches too: else a piece would change its day with each
    change, and could wait for ever.
    """
    days: list[list[Piece]] = [[] for _ in range(DAYS)]
    for piece in sorted(nightly, key=lambda piece: (-expected(piece, record), piece)):
        min(days, key=lambda pieces: sum(expected(each, record) for each in pieces)).append(piece)
    return days[day % DAYS]


@dataclass
class Run:
    """The parts that have run: seconds of each, their cases, and which of them failed."""

    folder: Path
    began: float = field(default_factory=time.monotonic)
    took: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    seconds: Seconds = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def make(self, target: str, *variables: str, seconds: float | None = None, stop: float = STOP) -> None:
        """Runs a target of make, of its cases those that begin within ``seconds``, until ``stop`` after the start."""
        print(f"\n=== {target}, after {self.elapsed():.0f} s", flush=True)
        junit, began = self.folder / f"{target}.xml", time.monotonic()
        options = [os.environ.get("PYTEST_ADDOPTS", ""), f"--junitxml={shlex.quote(str(junit))}"]
        options += [] if seconds is None else [f"--until={time.time() + seconds:.0f}"]
        given = os.environ | {"PYTEST_ADDOPTS": " ".join(options)}
        process = subprocess.Popen(["make", target, *variables], cwd=HOME, env=given, start_new_session=True)
        try:
            code = process.wait(max(1.0, stop - self.elapsed()))
        except subprocess.TimeoutExpired:
            code = 1
            print(f"=== {target} is stopped: it was still running after {stop / 60:.0f} minutes", flush=True)
        finally:  # what it has started too, which Ctrl-C would not reach
            for sent, seconds_to_end in ((signal.SIGINT, 20), (signal.SIGTERM, 1), (signal.SIGKILL, 1)):
                try:
                    os.killpg(process.pid, sent)  # pytest says what has failed so far when it is interrupted
                    process.wait(seconds_to_end)
                except subprocess.TimeoutExpired:
                    continue
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

    everything, record, all_files = pieces(), read(RECORD), [file for _, file in pieces()]
    base = options.base or base_of_head()
    changed = changed_since(base) if base else None
    try:
        files = all_files if changed is None else touched(changed, all_files)  # without a base, all has changed
    except UnknownPath as error:
        print(error)
        return 1
    present = [piece for piece in everything if piece[1] not in NEEDS or shutil.which(NEEDS[piece[1]])]
    by_change = [piece for piece in present if piece[1] in files]
    nightly = [piece for piece in present if piece[0].startswith("soak")]
    turn = [piece for piece in turn_of(nightly, record, options.day) if piece not in by_change]
    others = [piece for piece in everything if piece not in (*by_change, *turn)]
    print(f"{len(by_change)} files of long cases are touched, {len(turn)} have their turn, {len(others)} have neither")

    run, plan = Run(RUNS / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")), shares([*by_change, *turn], record)
    if options.plan:
        for name, (files, seconds) in plan.items():
            print(f"{name}, {seconds:.0f} s by the record: {' '.join(files)}")
        return 0
    faults = FAULTS if any(path.startswith(("addons/", "sd_quant/", "tests/")) for path in changed or ()) else 0
    run.make("test", stop=TEST_STOP)
    while plan:
        name, (files, seconds) = next(iter(plan.items()))
        left = LIMIT - LAST_CASES - faults - run.elapsed()
        if left <= 0:
            break
        run.make(name, f"FILES={' '.join(files)}", seconds=left * seconds / sum(each for _, each in plan.values()))
        del plan[name]
    if faults and (left := LIMIT - LAST_CASES - run.elapsed()) > 0:
        run.make("mutations", f"OPTIONS=--touched {base} --seconds {left:.0f}")
    return report(run, record, {name: files for name, (files, _) in plan.items()}, others)


def shares(wanted: Iterable[Piece], record: Seconds) -> dict[str, tuple[list[str], float]]:
    """By part its files, the shortest first, and the seconds that it should take, its start included."""
    plan: dict[str, tuple[list[str], float]] = {}
    for piece in sorted(wanted, key=lambda piece: (list(PARTS).index(piece[0]), expected(piece, record))):
        files, seconds = plan.get(piece[0], ([], PARTS[piece[0]].setup))
        plan[piece[0]] = [*files, piece[1]], seconds + expected(piece, record)
    return plan


def report(run: Run, record: Seconds, not_begun: dict[str, list[str]], others: Sequence[Piece]) -> int:
    """Prints what ran and what did not, by part, case and file; the exit code."""
    print("\n=== what took how long")
    for name, seconds in run.took.items():
        print(f"{seconds:7.0f} s  {name}{' FAILED' if name in run.failed else ''}")
    print(f"{run.elapsed():7.0f} s  in all, of {LIMIT} s")
    commit, known = (sum(s for (part, _), s in each.items() if part == "test") / 2 for each in (run.seconds, record))
    print(f"commit cases: {commit:.0f} s on two workers, {known:.0f} s by the record, {COMMIT_GOAL} s is the goal")
    print("since the record", *change(record, run.seconds, rows=5), sep="\n")
    left_out = Counter(case.file for case in run.cases if case.late)
    print(f"\nleft out for time: {left_out.total()} cases of {len(left_out)} files")
    print(*(f"{count:4} of {file}" for file, count in sorted(left_out.items())), sep="\n")
    print(*(f"all of {name}: {' '.join(files)}" for name, files in not_begun.items()), sep="\n")
    print(f"neither touched nor due today: {len(others)} files")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
