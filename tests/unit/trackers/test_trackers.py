import logging
import math
import pkgutil
import sys

import pytest

from sd_quant import trackers
from sd_quant.trackers import LONGEST_TEXT, read_run, track

pytestmark = pytest.mark.commit


@pytest.fixture
def told(monkeypatch) -> list:
    """What the tracker ``list`` was told; ``broken`` raises."""
    found = []

    def broken(run, store) -> None:
        raise RuntimeError("the database\nis locked")

    functions = {"broken": broken, "list": lambda *given: found.append(given)}
    monkeypatch.setattr(trackers, "TRACKERS", {name: name for name in functions})
    monkeypatch.setattr(pkgutil, "resolve_name", functions.get)
    return found


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
        track(["broken", "list"], record, directory, tmp_path)
    assert told == [(read_run(record, directory), tmp_path)]
    (failed,) = caplog.messages
    assert failed == "the tracker broken was not told of this run: RuntimeError: the database is locked"
    track(["list"], {"fidelity": [1]}, directory, tmp_path)  # a record that cannot be read
    assert len(caplog.messages) == 2 and len(told) == 1


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
