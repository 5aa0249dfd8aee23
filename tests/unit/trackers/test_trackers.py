import logging
import math
import pkgutil

import pytest

from sd_quant import trackers
from sd_quant.trackers import LONGEST_TEXT, read_run, track

TOLD = []


@pytest.fixture
def told(monkeypatch) -> list:
    """What the tracker ``list`` was told; ``broken`` raises."""
    TOLD.clear()
    monkeypatch.setattr(trackers, "TRACKERS", {"broken": f"{__name__}:broken", "list": f"{__name__}:append"})
    monkeypatch.setattr(pkgutil, "resolve_name", lambda name: globals()[name.rpartition(":")[2]])
    return TOLD


def append(run, store) -> None:
    TOLD.append((run, store))


def broken(run, store) -> None:
    raise RuntimeError("the database\nis locked")


def test_knobs_are_flat_and_the_text_of_others_is_short_and_harmless(record, directory):
    knobs = read_run(record, directory).knobs
    prompts = knobs.pop("infer.prompts")
    assert len(prompts) == LONGEST_TEXT and prompts.endswith("...") and prompts.isprintable()
    assert knobs == {
        "quant_level": 3.0,
        "alpha": "auto",
        "keep": "null",
        "snapshots": "[32, 64]",
        "infer.width": 64,
        "infer.static": False,
    }


def test_metrics_are_the_numbers_that_exist(record, directory, metrics):
    run = read_run(record, directory)
    assert run.metrics == metrics
    assert run.series == {"fidelity/latent_sqnr_db": [40.0, None, 25.1]}
    record["peak_memory_bytes"] = math.nan
    assert "peak_memory_bytes" not in read_run(record, directory).metrics


def test_a_run_is_named_so_that_two_sweeps_differ(record, directory):
    assert read_run(record, directory).name == "multirun/0"


def test_a_failed_run_has_what_it_has(tmp_path):
    run = read_run({"status": "failed", "reason": "disk", "fidelity": None}, tmp_path)
    assert (run.knobs, run.metrics, run.series, run.image) == ({}, {}, {}, None)


def test_every_tracker_is_told_whatever_the_others_do(told, record, directory, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sd_quant"):
        track(["absent", "broken", "list"], record, directory, tmp_path)
    assert told == [(read_run(record, directory), tmp_path)]
    absent, failed = caplog.messages
    assert absent.startswith("the tracker absent was not told of this run: there is no such tracker; take broken or")
    assert failed == "the tracker broken was not told of this run: RuntimeError: the database is locked"


def test_a_record_that_cannot_be_read_is_a_warning_too(told, directory, tmp_path, caplog):
    track(["list"], {"fidelity": [1]}, directory, tmp_path)
    assert len(caplog.messages) == 1 and not told


def test_every_tracker_of_the_registry_is_there():
    assert all(callable(pkgutil.resolve_name(place)) for place in trackers.TRACKERS.values())
