import logging
import math
import pkgutil
import sys

import pytest

from sd_quant import trackers
from sd_quant.trackers import LONGEST_TEXT, read_run, track

pytestmark = pytest.mark.commit

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


def test_knobs_are_flat_the_text_of_others_is_short_and_harmless_and_metrics_are_numbers(record, directory, metrics):
    run = read_run(record, directory)
    prompts = run.knobs.pop("infer.prompts")
    assert len(prompts) == LONGEST_TEXT and prompts.endswith("...") and prompts.isprintable()
    assert run.knobs == {
        "quant_level": 3.0, "alpha": "auto", "keep": "null", "snapshots": "[32, 64]", "infer.width": 64,
        "infer.static": False,
    }  # fmt: skip
    assert run.name == "multirun/0"  # so that two sweeps differ
    assert run.metrics == metrics and run.series == {"fidelity/latent_sqnr_db": [40.0, None, 25.1]}
    record["peak_memory_bytes"] = math.nan
    assert "peak_memory_bytes" not in read_run(record, directory).metrics


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


@pytest.mark.parametrize(
    ("tracker", "modules"),
    [("mlflow", ["mlflow", "mlflow.entities"]), ("tensorboard", ["torch.utils.tensorboard", "tensorboard"])],
)
def test_without_its_package_the_warning_says_what_to_install(
    record, directory, tmp_path, caplog, monkeypatch, tracker, modules
):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    track([tracker], record, directory, tmp_path)
    assert f"pip install 'sd-quant[{tracker}]'" in caplog.messages[0]
