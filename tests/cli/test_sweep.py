"""A real sweep: killed and started again it leaves what an unbroken one leaves; one failed job stops no other."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from sd_quant.places import CONF

from .shared import JOBS, json_of, record_of, rows_of, without_times

pytestmark = pytest.mark.commit


def table(folder: Path) -> list[dict]:
    return rows_of(folder / "sweep/summary.csv")


@pytest.fixture(scope="module")
def unbroken(unbroken_sweep) -> Path:
    """The tests of this file change it, one after the other."""
    return unbroken_sweep


def test_a_sweep_leaves_its_table_plots_and_report(unbroken):
    told = (unbroken / "stdout").read_text()
    assert f"sweep of 3 jobs in {unbroken}/sweep" in told and "job 3 of 3: quant_level=3" in told
    left = {path.name for path in (unbroken / "sweep").iterdir()}
    assert {*JOBS, "summary.csv", "summary.md", "summary.parquet", "report.html", "recommendation.json"} <= left
    assert {"pareto_latency.png", "pareto_size.png", "trajectory.png", "layers.png", "ranges.png"} <= left
    assert [(row["job"], row["status"]) for row in table(unbroken)] == [(job, "done") for job in JOBS]
    sizes = [float(row["denoiser_onnx_bytes"]) for row in table(unbroken)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("experiment", [path.stem for path in (CONF / "experiment").glob("*.yaml")])
def test_a_shipped_experiment_runs(done, tiny, with_graphs, tmp_path, experiment):
    """One job of each, by its own recipe and its own report."""
    one = "quantize=nemo quant_level=2.5 percentile=1.0 infer.batch_size=1 infer.steps=2 alpha=0.8".split()
    where = f"cache.dir={with_graphs(tmp_path / 'cache')}", f"hydra.sweep.dir={tmp_path}/sweep"
    done("quantize.py", f"experiment={experiment}", *tiny.knobs, *one, "attention=null", "collect_method=null", *where)
    (record,) = (tmp_path / "sweep").glob("*/metrics.json")
    assert record_of(record.parent)["knobs"]["format"] == "nemo"
    page = (tmp_path / "sweep/report.html").read_text()
    beside = {"nemo_docs_tables": "Framework against INT8 engine, beside NeMo",
              "nvidia_article": "Compiled framework against INT8 engine, beside NVIDIA"}  # fmt: skip
    assert {name for name, heading in beside.items() if heading in page} == {experiment} & beside.keys()


def test_what_jobs_share_is_made_once(unbroken):
    """One calibration, one graph, the unquantized parts and images once, and three quantized UNets."""
    entries = {
        kind: len(list((unbroken / "cache" / kind).glob("*/manifest.json"))) for kind in ("graph", "onnx", "images")
    }
    assert entries == {"graph": 3, "onnx": 3 + 3, "images": 2}  # torch's, and the unquantized engine's
    full = [unbroken / "sweep" / job / "full_precision/onnx/unet/unet.onnx" for job in JOBS]
    assert full[0].samefile(full[1]) and full[0].samefile(full[2])


@pytest.mark.nightly
def test_killed_and_started_again_it_leaves_the_same(unbroken, start, done, sweep_arguments, with_graphs, tmp_path):
    with_graphs(tmp_path / "cache")
    with start(*sweep_arguments(tmp_path)) as process:
        while not (tmp_path / "sweep" / JOBS[1] / "config.yaml").exists():  # the second job has begun
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "sweep" / JOBS[1] / "metrics.json").exists()
    first = (tmp_path / "sweep" / JOBS[0] / "metrics.json").read_bytes()

    said = done(*sweep_arguments(tmp_path)).stdout
    assert "sweep of 3 jobs" in said and ": 1 done before\n" in said
    assert (tmp_path / "sweep" / JOBS[0] / "metrics.json").read_bytes() == first
    assert without_times(tmp_path / "sweep/summary.csv") == without_times(unbroken / "table.csv")


@pytest.mark.nightly
def test_a_failed_job_stops_no_other_and_is_tried_again(unbroken, command, done, sweep_arguments):
    """Of the finished sweep one job is made to fail."""
    broken = unbroken / "sweep" / JOBS[1]
    (broken / "metrics.json").unlink()
    lock = broken / ".lock"
    lock.unlink()
    lock.mkdir()  # what the job opens first
    result = command(*sweep_arguments(unbroken))
    assert result.returncode == 1
    [*_, said] = result.stderr.rstrip().splitlines()
    assert said.startswith("error: 1 of 3 jobs is not done (quant_level=2: ") and ".lock is no file" in said
    assert [row["status"] for row in table(unbroken)] == ["done", "failed", "done"]
    assert ".lock is no file" in table(unbroken)[1]["reason"]
    assert ".lock is no file" in (unbroken / "sweep" / "report.html").read_text(encoding="utf-8")

    lock.rmdir()
    said = done(*sweep_arguments(unbroken)).stdout
    assert "2 done before, 1 failed before and tried again" in said
    assert "job 2 of 3: quant_level=2, failed before: " in said
    assert [row["status"] for row in table(unbroken)] == ["done"] * 3


@pytest.mark.nightly
def test_a_job_of_other_code_or_input_is_done_again(unbroken, done, sweep_arguments):
    record = unbroken / "sweep" / JOBS[0] / "metrics.json"
    content = json_of(record)
    record.write_text(json.dumps(content | {"fingerprint": "of another checkpoint"}))
    said = done(*sweep_arguments(unbroken)).stdout
    assert said.count("done before: nothing that this job depends on has changed") == 2
    assert said.count("\nrecipe ") == 1 and "fidelity to full precision" not in said  # one table
    assert json_of(record)["fingerprint"] == content["fingerprint"]


def test_the_report_is_made_again_from_the_records(unbroken, command, done):
    before = (unbroken / "sweep" / "summary.csv").read_bytes()
    for name in ("summary.csv", "report.html", "pareto_size.png"):
        (unbroken / "sweep" / name).unlink()
    done("-m", "sd_quant.report", unbroken / "sweep")
    assert (unbroken / "sweep" / "summary.csv").read_bytes() == before
    assert (unbroken / "sweep" / "report.html").exists() and (unbroken / "sweep" / "pareto_size.png").exists()
    done("-m", "sd_quant.report", unbroken / "sweep" / JOBS[0])
    assert (unbroken / "sweep" / JOBS[0] / "report.html").exists()
    refused = command("-m", "sd_quant.report", unbroken)
    assert refused.returncode == 3 and refused.stderr.startswith(f"error: {unbroken} holds neither sweep.json nor")
    assert refused.stderr.count("\n") == 1 and not (unbroken / "report.html").exists()
