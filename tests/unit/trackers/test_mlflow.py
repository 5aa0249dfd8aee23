"""MLflow brings twenty packages, so the tests do without; where it is installed, it is asked itself."""

import os
import sqlite3
import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import pytest

from sd_quant.trackers import track

pytestmark = pytest.mark.commit

Param = namedtuple("Param", "key value")
Metric = namedtuple("Metric", "key value timestamp step")


class Client:
    """What sd_quant.trackers.mlflow calls of MlflowClient, writing down what it is told."""

    known: dict = {}
    runs: dict = {}
    full = False

    def __init__(self, uri: str):
        self.uri = uri

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.known[name][0]) if name in self.known else None

    def create_experiment(self, name, artifact_location):
        assert name not in self.known
        self.known[name] = ("7", artifact_location)
        return "7"

    def create_run(self, experiment_id, run_name):
        assert experiment_id == "7"
        run_id = str(len(self.runs))
        self.runs[run_id] = {"name": run_name, "uri": self.uri, "params": [], "metrics": [], "images": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, start_time=1))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def log_artifact(self, run_id, path, folder):
        if self.full:
            raise OSError(28, "No space left on device")
        self.runs[run_id]["images"].append((path, folder))

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


@pytest.fixture
def client(monkeypatch) -> type[Client]:
    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")}
    modules["mlflow.entities"].Metric, modules["mlflow.entities"].Param = Metric, Param
    modules["mlflow.tracking"].MlflowClient = fresh = type("Fresh", (Client,), {"known": {}, "runs": {}})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")  # so that it is put back afterwards
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    return fresh


def test_knobs_numbers_series_and_image_are_logged(client, record, directory, metrics, tmp_path, caplog):
    store = tmp_path / "store"
    record["knobs"] |= {f"knob{index}": index for index in range(250)}  # more than MLflow takes at once
    for _ in range(2):
        track(["mlflow"], record, directory, store)
    assert not caplog.messages
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert client.known == {"sd-quant": ("7", (store / "mlflow").as_uri())}
    assert [run["name"] for run in client.runs.values()] == ["multirun/0"] * 2
    run = client.runs["1"]
    assert run["uri"] == f"sqlite:///{store}/mlflow.db"
    params = {param.key: param.value for param in run["params"]}
    assert (params["alpha"], params["quant_level"], params["knob249"]) == ("auto", "3.0", "249")
    logged = [(metric.key, metric.step, metric.value) for metric in run["metrics"]]
    series = [("fidelity/latent_sqnr_db", 1, 40.0), ("fidelity/latent_sqnr_db", 3, 25.1)]
    assert sorted(logged) == sorted([(name, 1, value) for name, value in metrics.items()] + series)
    assert run["images"] == [(str(directory / "images/grid.png"), "images")]
    assert run["status"] == "FINISHED"


def test_a_run_that_could_not_be_logged_in_full_says_so(client, record, directory, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(client, "full", True)
    track(["mlflow"], record, directory, tmp_path)
    assert client.runs["0"]["status"] == "FAILED"
    assert "the tracker mlflow was not told of this run: OSError" in caplog.messages[0]


def test_mlflow_itself_keeps_it(record, directory, metrics, tmp_path, caplog):
    pytest.importorskip("mlflow")
    store = tmp_path / "store"
    track(["mlflow"], record, directory, store)
    assert not [each for each in caplog.records if each.name.startswith("sd_quant")]
    database = sqlite3.connect(store / "mlflow.db")
    found = dict(database.execute("select key, value from latest_metrics"))
    assert found == pytest.approx(metrics | {"fidelity/latent_sqnr_db": 25.1})
    assert ("alpha", "auto") in database.execute("select key, value from params").fetchall()
    assert database.execute("select name, status from runs").fetchall() == [("multirun/0", "FINISHED")]
    assert len(list((store / "mlflow").rglob("grid.png"))) == 1
    database.execute("begin exclusive")
    track(["mlflow"], record, directory, store)
    database.close()
    assert "database is locked" in caplog.messages[-1]
