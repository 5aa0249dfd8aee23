import json

import pytest

from sd_quant.metrics import intervals
from sd_quant.report import rebuild
from sd_quant.report.summary import Sweep, read_sweep
from sd_quant.report.timing import TIMING

from .sweeps import timing, write_sweep


@pytest.fixture(autouse=True)
def openings(monkeypatch) -> None:
    """The intervals that tests expect are of engines that were opened once, and that differ so much when they are."""
    monkeypatch.setattr(intervals, "OPENING", 0.006)


@pytest.fixture
def small_sweep(tmp_path) -> Sweep:
    return write_sweep(tmp_path)


@pytest.fixture
def without_plots(monkeypatch) -> None:
    """For tests of the rest of a page: plots take most of the time."""
    monkeypatch.setattr(rebuild, "figures", lambda sweep, advice: {})


@pytest.fixture
def timed(small_sweep):
    """``timed(jobs, ...)`` writes ``timing.json`` into the sweep's folder and reads the sweep again."""

    def write(*arguments, left_out=(), **changes):
        content = timing(*arguments, **changes) | {"left_out": list(left_out)}
        (small_sweep.directory / TIMING).write_text(json.dumps(content))
        return read_sweep(small_sweep.directory)

    return write
