"""Trackers. MLflow brings twenty packages, so most tests do without; where it is installed, it is asked itself."""

import logging
import math
import os
import pkgutil
import sqlite3
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sd_quant import trackers
from sd_quant.trackers import LONGEST_TEXT, read_run, track

pytestmark = pytest.mark.commit


@pytest.fixture
def directory(tmp_path) -> Path:
    folder = tmp_path / "multirun" / "0"
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (40, 20), "red").save(folder / "images" / "grid.png")
    return folder


@pytest.fixture
def record() -> dict:
    times = {
        "full_precision": {"p50_ms": 15.05, "n": 20, "warmup": 3, "samples_ms": [15.0, 15.1]},
        "quantized": {"p50_ms": None, "reason": "not quantized"}, "speedup": {"value": 1.35, "reason": None},
    }  # fmt: skip
    infer = {"width": 64, "prompts": ["\x1b[31mred\x1b[0m\n" * 100], "static": False}
    return {
        "schema_version": 1, "status": "done",
        "knobs": {"quant_level": 3.0, "alpha": "auto", "keep": None, "snapshots": [32, 64], "infer": infer},
        "sizes_bytes": {"unet_xl": {"onnx_quantized": 9_700_000, "plan": {"value": None, "reason": "no plan"}}},
        "latency": {"openvino": {"unet_xl": {"2": times}}},
        "fidelity": {
            "psnr": {"mean": 35.0, "min": 32.4, "worst_index": 3, "values": [35.0, 32.4], "reason": None},
            "latent_sqnr_db": [40.0, None, 25.1], "latent_sqnr_reason": "identical",
            "other": {"value": 3.2, "reason": None, "images": 64, "features": 1280},
        },
        "peak_memory_bytes": 1_460_000_000, "stages": {"load": {"seconds": 0.4, "peak_memory_bytes": 5_000_000}},
    }  # fmt: skip


METRICS = {  # of the record
    "fidelity/psnr/mean": 35.0, "fidelity/psnr/min": 32.4, "fidelity/other": 3.2,
    "latency/openvino/unet_xl/2/full_precision/p50_ms": 15.05, "latency/openvino/unet_xl/2/speedup": 1.35,
    "sizes_bytes/unet_xl/onnx_quantized": 9_700_000.0, "peak_memory_bytes": 1_460_000_000.0,
    "stages/load/seconds": 0.4, "stages/load/peak_memory_bytes": 5_000_000.0,
}  # fmt: skip


def test_knobs_are_flat_the_text_of_others_is_short_and_harmless_and_metrics_are_numbers(record, directory):
    run = read_run(record, directory)
    prompts = run.knobs.pop("infer.prompts")
    assert len(prompts) == LONGEST_TEXT and prompts.endswith("...") and prompts.isprintable()
    assert run.knobs == {
        "quant_level": 3.0, "alpha": "auto", "keep": "null", "snapshots": "[32, 64]", "infer.width": 64,
        "infer.static": False,
    }  # fmt: skip
    assert run.name == "multirun/0"  # so that two sweeps differ
    assert run.metrics == METRICS and run.series == {"fidelity/latent_sqnr_db": [40.0, None, 25.1]}
    record["peak_memory_bytes"] = math.nan
    assert "peak_memory_bytes" not in read_run(record, directory).metrics


def test_every_tracker_is_told_whatever_the_others_do(record, directory, tmp_path, caplog, monkeypatch):
    broken, listed = (Mock(side_effect=effect) for effect in (RuntimeError("the database\nis locked"), None))
    monkeypatch.setattr(trackers, "TRACKERS", {"broken": broken, "list": listed})
    monkeypatch.setattr(pkgutil, "resolve_name", lambda function: function)
    with caplog.at_level(logging.WARNING, "sd_quant"):
        track(["broken", "list"], record, directory, tmp_path)
    listed.assert_called_once_with(read_run(record, directory), tmp_path)
    assert caplog.messages == ["the tracker broken was not told of this run: RuntimeError: the database is locked"]
    track(["list"], {"fidelity": [1]}, directory, tmp_path)  # a record that cannot be read
    assert len(caplog.messages) == 2 and listed.call_count == 1


@pytest.mark.parametrize(("tracker", "modules"), [
    ("mlflow", ["mlflow", "mlflow.entities"]), ("tensorboard", ["torch.utils.tensorboard", "tensorboard"]),
])  # fmt: skip
def test_without_its_package_the_warning_says_what_to_install(
    record, directory, tmp_path, caplog, monkeypatch, tracker, modules
):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    track([tracker], record, directory, tmp_path)
    assert f"pip install 'sd-quant[{tracker}]'" in caplog.messages[0]


def test_tensorboard_has_knobs_numbers_series_and_image(record, directory, tmp_path, caplog):
    track(["tensorboard"], record, directory, tmp_path / "store")
    assert not caplog.messages
    events = EventAccumulator(str(tmp_path / "store/tensorboard/multirun/0"))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found.pop("fidelity/latent_sqnr_db") == [(1, 40.0), (3, pytest.approx(25.1))]
    assert found == {name: [(0, pytest.approx(value))] for name, value in METRICS.items()}
    image = events.Images("images/grid")[0]
    assert (image.width, image.height) == (40, 20)
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"quant_level" in start and b"infer.prompts" in start


def test_mlflow_is_told_knobs_numbers_series_and_image(record, directory, tmp_path, caplog, monkeypatch):
    kind, store = Mock(), tmp_path / "store"
    client, entities = kind.return_value, Mock(Metric=namedtuple("Metric", "key value timestamp step"))
    entities.Param = namedtuple("Param", "key value")
    client.get_experiment_by_name.side_effect = [None, *[SimpleNamespace(experiment_id="7")] * 2]
    client.create_experiment.return_value = "7"
    client.create_run.return_value.info = SimpleNamespace(run_id="a", start_time=1)
    modules = {"mlflow": Mock(), "mlflow.entities": entities, "mlflow.tracking": Mock(MlflowClient=kind)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")  # so that it is put back afterwards
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    record["knobs"] |= {f"knob{index}": index for index in range(250)}  # more than MLflow takes at once
    for _ in range(2):
        client.log_batch.reset_mock()
        track(["mlflow"], record, directory, store)
    assert not caplog.messages
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    kind.assert_called_with(f"sqlite:///{store}/mlflow.db")
    client.create_experiment.assert_called_once_with("sd-quant", artifact_location=(store / "mlflow").as_uri())
    assert client.create_run.call_args_list == [call("7", run_name="multirun/0")] * 2
    batches = [each.kwargs for each in client.log_batch.call_args_list]
    assert all(each.args == ("a",) for each in client.log_batch.call_args_list)
    assert [len(batch["params"]) for batch in batches if "params" in batch] == [100, 100, 57]
    params = {param.key: param.value for batch in batches for param in batch.get("params", ())}
    assert (params["alpha"], params["quant_level"], params["knob249"]) == ("auto", "3.0", "249")
    logged = [(each.key, each.step, each.value) for batch in batches for each in batch.get("metrics", ())]
    series = [("fidelity/latent_sqnr_db", 1, 40.0), ("fidelity/latent_sqnr_db", 3, 25.1)]
    assert sorted(logged) == sorted([(name, 1, value) for name, value in METRICS.items()] + series)
    client.log_artifact.assert_called_with("a", str(directory / "images/grid.png"), "images")
    client.set_terminated.assert_called_with("a", "FINISHED")
    client.log_artifact.side_effect = OSError(28, "No space left on device")
    track(["mlflow"], record, directory, store)
    client.set_terminated.assert_called_with("a", "FAILED")
    assert "the tracker mlflow was not told of this run: OSError" in caplog.messages[0]


def test_mlflow_itself_keeps_it(record, directory, tmp_path, caplog):
    pytest.importorskip("mlflow")
    store = tmp_path / "store"
    track(["mlflow"], record, directory, store)
    assert not [each for each in caplog.records if each.name.startswith("sd_quant")]
    database = sqlite3.connect(store / "mlflow.db")
    found = dict(database.execute("select key, value from latest_metrics"))
    assert found == pytest.approx(METRICS | {"fidelity/latent_sqnr_db": 25.1})
    assert ("alpha", "auto") in database.execute("select key, value from params").fetchall()
    assert database.execute("select name, status from runs").fetchall() == [("multirun/0", "FINISHED")]
    assert len(list((store / "mlflow").rglob("grid.png"))) == 1
    database.execute("begin exclusive")
    track(["mlflow"], record, directory, store)
    database.close()
    assert "database is locked" in caplog.messages[-1]
