"""Faults of a cluster: what befalls a sweep, what is done about it, and a table of the outcomes."""

import time
from collections.abc import Callable

import pytest

from ..shared import link_cache, same, well, without_times
from ..sweeping import ended

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
def seen(record_property, launcher) -> Callable[[str, str], None]:
    """``seen(fault, outcome)`` puts a row into the table of a test that passes."""
    return lambda fault, outcome: record_property(FAULT, f"{fault} | {launcher.name} | {outcome}")


@pytest.fixture(scope="session")
def eight(process, sweep_arguments, unbroken_sweep, tmp_path_factory) -> tuple[list[dict], float]:
    """The table of eight jobs without a launcher, and the seconds that they took."""
    folder = tmp_path_factory.mktemp("eight")
    link_cache(unbroken_sweep / "cache", folder / "cache")
    started = time.monotonic()
    well(process(*sweep_arguments(folder, *EIGHT)))
    return without_times(folder / "sweep/summary.csv"), time.monotonic() - started


@pytest.fixture
def eight_jobs(eight, sweep, seen) -> Callable[[], None]:
    """Asserts that a launcher does eight jobs as they are done without one, and tells what it took."""

    def check() -> None:
        started, (rows, alone) = time.monotonic(), eight
        stdout, stderr = ended(sweep.begin(*EIGHT))
        seconds = time.monotonic() - started
        assert "sacct" not in stdout + stderr, stderr[-3000:]
        assert len(rows) == 8 and same(without_times(sweep.folder / "summary.csv"), rows)
        took = f"{seconds:.0f} s on two nodes of a core; {alone:.0f} s in one process"
        seen("none, eight jobs", f"the table of a sweep without a launcher; {took}")

    return check
