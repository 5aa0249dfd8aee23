"""Faults of a cluster: what befalls a sweep, what is done about it, and a table of the outcomes."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sd_quant.cache import open_lock, try_lock

from ..sweeps import JOBS as ALL_JOBS
from ..sweeps import link_cache, same, without_times

JOBS = ALL_JOBS[:2]
EIGHT = ["quant_level=2,3", "alpha=0.3,0.5,0.7,0.9"]
FAULT = "fault | launcher | outcome"


def pytest_terminal_summary(terminalreporter) -> None:
    """A table of what was seen: one row for each test that has passed."""
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    rows = [text for report in reports for name, text in report.user_properties if name == FAULT]
    if rows:
        terminalreporter.section("faults of a cluster")
        terminalreporter.write_line("\n".join([f"| {FAULT} |", "|---|---|---|", *(f"| {row} |" for row in rows)]))


@pytest.fixture
def seen(record_property) -> Callable[[str, str, str], None]:
    """``seen(fault, launcher, outcome)`` puts a row into the table of a test that passes."""
    return lambda *cells: record_property(FAULT, " | ".join(cells))


@pytest.fixture
def sweep(tmp_path) -> Path:
    return tmp_path / "sweep"


@pytest.fixture
def arguments(sweep_arguments, unbroken_sweep, tmp_path) -> Callable[..., list[str]]:
    """The command line of a sweep of two jobs in the test's folder, which has the undisturbed sweep's cache."""
    link_cache(unbroken_sweep / "cache", tmp_path / "cache")
    return lambda *more: sweep_arguments(tmp_path, "quant_level=1,2", *more)


@pytest.fixture(scope="module")
def undisturbed(unbroken_sweep) -> list[dict]:
    """The table of these jobs without a launcher."""
    return without_times(unbroken_sweep / "table.csv")[: len(JOBS)]


@pytest.fixture(scope="session")
def eight(process, sweep_arguments, unbroken_sweep, tmp_path_factory) -> tuple[list[dict], float]:
    """The table of eight jobs without a launcher, and the seconds that they took."""
    folder = tmp_path_factory.mktemp("eight")
    link_cache(unbroken_sweep / "cache", folder / "cache")
    started = time.monotonic()
    result = process(*sweep_arguments(folder, *EIGHT))
    assert result.returncode == 0, result.stderr[-3000:]
    return without_times(folder / "sweep/summary.csv"), time.monotonic() - started


@pytest.fixture
def eight_jobs(run, eight, sweep, seen) -> Callable[[str], None]:
    """Asserts that a launcher does eight jobs as they are done without one, and tells what it took."""

    def check(launcher: str) -> None:
        started, (rows, alone) = time.monotonic(), eight
        code, stdout, stderr = ended(run(*EIGHT))
        seconds = time.monotonic() - started
        assert code == 0 and "sacct" not in stdout + stderr, stderr[-3000:]
        assert len(rows) == 8 and same(without_times(sweep / "summary.csv"), rows)
        took = f"{seconds:.0f} s on two nodes of a core; {alone:.0f} s in one process"
        seen("none, eight jobs", launcher, f"the table of a sweep without a launcher; {took}")

    return check


@pytest.fixture
def whole(undisturbed, sweep) -> Callable[[], None]:
    """Asserts that the sweep has its table, and that nobody holds a lock."""

    def check() -> None:
        assert same(without_times(sweep / "summary.csv"), undisturbed)
        assert not [lock for lock in sweep.parent.rglob(".*lock") if held(lock)]

    return check


def held(lock: Path) -> bool:
    with open_lock(lock) as file:
        return not try_lock(file)


def begun(sweep: Path, process, file: str = "config.yaml", text: str = "") -> None:
    """Return when the jobs have written this file, with a text in it."""
    files = [sweep / job / file for job in JOBS]
    while not all(path.exists() and text in path.read_text() for path in files):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def ended(process) -> tuple[int, str, str]:
    """The exit code and the output of a command, which ends within ten minutes."""
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout, stderr


def both_end_whole(first, second, sweep: Path, whole: Callable[[], None]) -> None:
    """Asserts that two commands end well, and that each has the whole table; the second's sweep is ``other``."""
    for command in (first, second):
        code, _, stderr = ended(command)
        assert code == 0, stderr[-3000:]
    whole()
    sweep.rename(sweep.with_name("first"))
    sweep.with_name("other").rename(sweep)
    whole()


def failure_of(job: Path) -> str:
    return json.loads((job / "failure.json").read_text())["reason"]


@pytest.fixture
def commands(start) -> Iterator[Callable]:
    """``start`` of commands that end with the test."""
    started = []

    def run(*arguments, **environment):
        started.append(start(*arguments, **environment))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()
