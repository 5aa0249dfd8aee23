"""``python -m tests.mutations.run``: would a test notice? One deliberate fault at a time, and the test that caught it.

``faults.yaml`` lists the faults: a text that stands exactly once in ``sd_quant``, what replaces it, and the tests that
should fail then. A fault does not say which file it is in, so code may move. Every worker has a copy of the repository
and changes nothing else. Exit code 1 when a fault survived or could not be tried.

The road not taken is a tool that changes every operator, such as mutmut: nine in ten of its mutants mean nothing to
anybody, and the run takes days.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.yaml")
PACKAGE = "sd_quant"
CAUGHT, SURVIVED, NOT_APPLICABLE = "caught by", "SURVIVED", "NOT APPLICABLE"
TIME_LIMIT = 900  # seconds for the tests of one fault, which may have made a loop endless


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    find: str  # stands exactly once in the package
    replace: str
    tests: list[str]  # paths or node ids of pytest


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: str  # CAUGHT, SURVIVED or NOT_APPLICABLE
    file: str
    because: str  # the test that failed, or why the fault could not be tried


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """The faults of all rooms in the order of the file."""
    rooms = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Fault(**fault) for faults in rooms.values() for fault in faults]


def files_with(text: str, repository: Path = REPOSITORY) -> list[Path]:
    """The package's Python files, each as often as it holds ``text``."""
    files = sorted((repository / PACKAGE).rglob("*.py"))
    return [file for file in files for _ in range(file.read_text(encoding="utf-8").count(text))]


def copy_repository(target: Path) -> None:
    """What git tracks and what it would add, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def run_tests(
    repository: Path, tests: Iterable[str], *options: str, limit: float | None = None, **settings: str
) -> tuple[int, list[str], str]:
    """pytest's exit code, the ids of the tests that failed and the last line of its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)} | settings
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    ended = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=limit)
    lines = ended.stdout.strip().splitlines()
    failed = [line.split(" ", 1)[1].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return ended.returncode, failed, lines[-1] if lines else ended.stderr.strip()[-300:]


def failing_unmutated(repository: Path, faults: Sequence[Fault]) -> list[str]:
    """The tests of all faults that fail without any: such a test catches nothing."""
    tests = sorted({test for fault in faults for test in fault.tests})
    code, failed, last = run_tests(repository, tests)
    if code not in (0, 1):
        raise SystemExit(f"pytest cannot run the tests of the faults: {last}")
    return failed


def belongs_to(failed: str, tests: Iterable[str]) -> bool:
    return any(failed == test or failed.startswith((f"{test}::", f"{test}[", f"{test}/")) for test in tests)


def try_fault(repository: Path, fault: Fault, already_failing: Sequence[str]) -> Outcome:
    """Put the fault into this copy, run its tests up to the first that fails, and take it out again."""
    files = files_with(fault.find, repository)
    if len(files) != 1:
        return Outcome(NOT_APPLICABLE, "-", f"its text stands {len(files)} times in {PACKAGE}, expected once")
    [file] = files
    name = str(file.relative_to(repository))
    if broken := [test for test in already_failing if belongs_to(test, fault.tests)]:
        return Outcome(NOT_APPLICABLE, name, f"{broken[0]} fails without the fault")
    original = file.read_text(encoding="utf-8")
    try:
        file.write_text(original.replace(fault.find, fault.replace), encoding="utf-8")
        code, failed, last = run_tests(repository, fault.tests, "-x", limit=TIME_LIMIT, PYTHONDONTWRITEBYTECODE="1")
    except subprocess.TimeoutExpired:
        return Outcome(CAUGHT, name, f"the time limit of {TIME_LIMIT} s")
    finally:
        file.write_text(original, encoding="utf-8")
    if code == 0:
        return Outcome(SURVIVED, name, ", ".join(fault.tests))
    return Outcome(CAUGHT, name, failed[0]) if failed else Outcome(NOT_APPLICABLE, name, f"pytest ended with {last}")


def try_faults(faults: Sequence[Fault], workers: int, tell: Callable[[Fault, Outcome], object]) -> list[Outcome]:
    """The outcome of each fault; ``tell`` hears of each when it is known."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for worker in range(min(workers, len(faults))):
            copy_repository(Path(folder) / str(worker))
            copies.put(Path(folder) / str(worker))
        already_failing = failing_unmutated(Path(folder) / "0", faults)

        def try_one(fault: Fault) -> Outcome:
            repository = copies.get()
            try:
                outcome = try_fault(repository, fault, already_failing)
            finally:
                copies.put(repository)
            tell(fault, outcome)
            return outcome

        with ThreadPoolExecutor(workers) as executor:
            return list(executor.map(try_one, faults))


def main() -> None:
    parser = argparse.ArgumentParser(description="Which test notices which deliberate fault.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--workers", type=int, default=1, help="copies of the repository to work in side by side")
    parser.add_argument("--list", action="store_true", help="name the faults and what each changes, and run nothing")
    given = parser.parse_args()
    faults = read_faults()
    if unknown := set(given.only or ()) - {fault.name for fault in faults}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not given.only or fault.name in given.only]
    if given.list:
        for fault in chosen:
            print(f"{fault.name}\n    {fault.find}\n    {fault.replace}")
        return

    def tell(fault: Fault, outcome: Outcome) -> None:
        print(f"{fault.name}  {outcome.file}  {outcome.verdict} {outcome.because}", flush=True)

    outcomes = try_faults(chosen, given.workers, tell)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(
        f"{len(outcomes)} faults: {counts[CAUGHT]} caught, {counts[SURVIVED]} survived, "
        f"{counts[NOT_APPLICABLE]} not applicable"
    )
    sys.exit(counts[CAUGHT] != len(outcomes))


if __name__ == "__main__":
    main()
