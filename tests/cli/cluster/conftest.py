"""A table of the faults put into sweeps on a cluster, and of their outcomes."""

from collections.abc import Callable

import pytest

FAULT = "fault | launcher | outcome"


def pytest_terminal_summary(terminalreporter) -> None:
    """A row for each test that has passed."""
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    rows = [text for report in reports for name, text in report.user_properties if name == FAULT]
    if rows:
        terminalreporter.section("faults of a cluster")
        terminalreporter.write_line("\n".join([f"| {FAULT} |", "|---|---|---|", *(f"| {row} |" for row in rows)]))


@pytest.fixture
def seen(record_property, launcher) -> Callable[[str, str], None]:
    """``seen(fault, outcome)`` puts a row into the table of a test that passes."""
    return lambda fault, outcome: record_property(FAULT, f"{fault} | {launcher.name} | {outcome}")
