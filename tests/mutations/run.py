"""``python -m tests.run mutations``: would a test notice? One deliberate fault at a time, and the test that caught it.

``faults.diff`` lists the faults: a text that stands exactly once in ``sd_quant``, what replaces it, and the tests that
should fail then. A fault does not say which file it is in, so code may move. It is put into a copy of the repository,
pytest runs its tests there up to the first that fails, and it is taken out again. Exit code 1 when a fault survived or
could not be tried.

pytest runs in a fork of this process, which has imported torch and its like before: of the ten seconds that the tests
of a fault take, eight are imports.
"""

import argparse
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ..cadence.ci import changed_since

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.diff")
CODE = ("sd_quant", "addons/*/sd_quant_*")  # folders, from the repository's root
CAUGHT, SURVIVED, NOT_APPLICABLE, NIGHTLY = "caught by", "SURVIVED", "NOT APPLICABLE", "left to --nightly:"
TIME_LIMIT = 900  # seconds for the tests of one fault, which may have made a loop endless
IMPORTED_ONCE = (
    *("torch._dynamo", "torchmetrics", "diffusers.models", "transformers.models.clip", "onnx", "onnxscript"),
    *("openvino", "onnxruntime", "matplotlib.figure", "modelopt.torch.quantization"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    find: str  # stands exactly once in the package
    replace: str
    tests: list[str]  # paths or node ids of pytest


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: Fault
    verdict: str  # CAUGHT, SURVIVED, NOT_APPLICABLE or NIGHTLY
    file: str
    because: str  # the test that failed, or why the fault could not be tried


class Failures:
    """A plugin of pytest that collects the ids of what failed: tests, their fixtures, files that cannot be imported."""

    def __init__(self):
        self.ids: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        self.ids += [report.nodeid] if report.failed else []

    pytest_collectreport = pytest_runtest_logreport


def read_faults() -> list[Fault]:
    """The faults of all rooms in the order of the file, three lines each."""
    lines = [line for line in FAULTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = []
    for head, find, changed in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, _, tests = head.partition(": ")
        found.append(Fault(name, find.removeprefix("- "), changed[2:], tests.split()))
    return found


def code_of(repository: Path) -> list[Path]:
    return sorted(file for folder in CODE for path in repository.glob(folder) for file in path.rglob("*.py"))


def files_with(text: str, repository: Path) -> list[Path]:
    """The Python files of the package and its add-ons, each as often as it holds ``text``."""
    return [file for file in code_of(repository) for _ in range(file.read_text(encoding="utf-8").count(text))]


def copy_repository(target: Path) -> None:
    """What git tracks and what it would add, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def start_tests(repository: Path, tests: Iterable[str], *options: str, limit: int = 0) -> int:
    """The number of a process that runs these tests; ``answer_of`` says how they ended once it has.

    ``options`` are pytest's. After ``limit`` seconds, if it is not 0, the process is ended.
    """
    if process := os.fork():
        return process
    try:
        os.chdir(repository)
        ours = [str(path) for path in (repository, *repository.glob("addons/*"))]
        os.environ["PYTHONPATH"] = os.pathsep.join(ours)
        os.environ.pop("PYTEST_ADDOPTS", None)  # which may leave cases out
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True  # it may be a fault's
        signal.alarm(limit)
        sys.path[:] = [*ours, *(path for path in sys.path if Path(path).resolve() != REPOSITORY)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        sys.argv = ["pytest"]
        with (repository / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        failures = Failures()
        quiet = ["-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*quiet, "-m", "not consumer", *options, *tests], plugins=[failures])
        (repository / "answer.json").write_text(json.dumps([code, failures.ids]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def answer_of(repository: Path) -> tuple[int, list[str]] | None:
    """pytest's exit code and the ids of what failed; None where the process did not live to say it."""
    answer = repository / "answer.json"
    found = json.loads(answer.read_text()) if answer.exists() else None
    answer.unlink(missing_ok=True)
    return found


def verdict(fault: Fault, file: str, answer: tuple[int, list[str]] | None) -> Outcome:
    code, failed = answer or (None, [f"the time limit of {TIME_LIMIT} s, or by ending the process"])
    if failed:
        return Outcome(fault, CAUGHT, file, failed[0])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Outcome(fault, NIGHTLY if code else SURVIVED, file, ", ".join(fault.tests))
    return Outcome(fault, NOT_APPLICABLE, file, f"pytest ended with {code} and no test failed")


def try_faults(
    faults: Sequence[Fault], copies: Sequence[Path], cadences: Sequence[str], seconds: float = math.inf
) -> Iterator[Outcome]:
    """The outcome of each fault that is begun within ``seconds``; as many are tried at a time as there are copies."""
    chosen = [f"--cadence={cadence}" for cadence in cadences]
    until = time.monotonic() + seconds
    waiting, free = list(reversed(faults)), list(copies)
    running: dict[int, tuple[Fault, Path, Path, str]] = {}
    while waiting or running:
        if time.monotonic() > until:
            waiting.clear()
        while waiting and free:
            fault, repository = waiting.pop(), free[-1]
            files = files_with(fault.find, repository)
            if len(files) != 1:
                why = f"its text stands {len(files)} times in {', '.join(CODE)}, expected once"
                yield Outcome(fault, NOT_APPLICABLE, "-", why)
                continue
            original = files[0].read_text(encoding="utf-8")
            files[0].write_text(original.replace(fault.find, fault.replace), encoding="utf-8")
            process = start_tests(repository, fault.tests, "-x", *chosen, limit=TIME_LIMIT)
            running[process] = fault, free.pop(), files[0], original
        if running:
            process, _ = os.wait()
            fault, repository, file, original = running.pop(process)
            file.write_text(original, encoding="utf-8")
            yield verdict(fault, str(file.relative_to(repository)), answer_of(repository))
            free.append(repository)


def without_fault(outcomes: Iterable[Outcome], repository: Path) -> list[Outcome]:
    """What was caught by a test that fails in an unchanged copy, too, and so catches nothing."""
    caught = [outcome for outcome in outcomes if outcome.verdict == CAUGHT and "::" in outcome.because]
    if not caught:
        return []
    os.waitpid(start_tests(repository, sorted({outcome.because for outcome in caught})), 0)
    answer = answer_of(repository)
    if answer is None or answer[0] not in (0, 1):
        raise SystemExit(f"the tests cannot be run without a fault:\n{(repository / 'output.txt').read_text()[-2000:]}")
    broken = [outcome for outcome in caught if outcome.because in answer[1]]
    return [replace(each, verdict=NOT_APPLICABLE, because=f"{each.because} fails without the fault") for each in broken]


def touched(faults: Sequence[Fault], changed: Collection[str]) -> list[Fault]:
    """Those whose text stands in a file that changed, or one of whose tests does."""
    texts = [
        (REPOSITORY / path).read_text(encoding="utf-8") for path in changed if REPOSITORY / path in code_of(REPOSITORY)
    ]
    return [
        fault
        for fault in faults
        if any(fault.find in text for text in texts) or any(test.partition("::")[0] in changed for test in fault.tests)
    ]


def run(wanted: argparse.Namespace) -> int:
    chosen = read_faults()
    if unknown := set(wanted.only or ()) - {fault.name for fault in chosen}:
        raise SystemExit(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in chosen if not wanted.only or fault.name in wanted.only]
    if wanted.touched:
        chosen = touched(chosen, changed_since(wanted.touched))
    with warnings.catch_warnings(action="ignore"):
        for name in IMPORTED_ONCE:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [Path(folder) / str(worker) for worker in range(wanted.workers)]
        for repository in copies:
            copy_repository(repository)
        outcomes: dict[str, Outcome] = {}
        cadences = ("commit", "nightly") if wanted.nightly else ("commit",)
        for outcome in try_faults(chosen, copies, cadences, wanted.seconds):
            tell(outcomes, outcome)
        for outcome in without_fault(outcomes.values(), copies[0]):
            tell(outcomes, outcome)
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    told = f"{counts[CAUGHT]} caught, {counts[SURVIVED]} survived, {counts[NOT_APPLICABLE]} not applicable"
    told += f", {counts[NIGHTLY]} whose tests are nightly"
    print(f"{len(chosen)} faults: {told}, {len(chosen) - len(outcomes)} not tried for time")
    return int(counts[CAUGHT] + counts[NIGHTLY] != len(outcomes))


def tell(outcomes: dict[str, Outcome], outcome: Outcome) -> None:
    outcomes[outcome.fault.name] = outcome
    print(f"{outcome.fault.name}  {outcome.file}  {outcome.verdict} {outcome.because}", flush=True)
