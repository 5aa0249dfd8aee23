"""A real sweep: killed and started again it leaves what an unbroken one leaves; one failed job stops no other."""

import json

import pytest

from sd_quant.places import CONF

from .shared import JOBS, json_of, record_of, rows_of, without_times
from .sweeping import killed

pytestmark = pytest.mark.commit


def statuses(sweep) -> list[str]:
    return [row["status"] for row in rows_of(sweep / "summary.csv")]


def test_a_sweep_leaves_its_table_plots_and_report_and_makes_once_what_its_jobs_share(unbroken_sweep):
    """One calibration, one graph, the unquantized parts and images once, and three quantized UNets."""
    told, sweep = (unbroken_sweep / "stdout").read_text(), unbroken_sweep / "kept"
    assert f"sweep of 3 jobs in {unbroken_sweep}/sweep" in told and "job 3 of 3: quant_level=3" in told
    left = {path.name for path in sweep.iterdir()}
    assert {*JOBS, "summary.csv", "summary.md", "report.html", "recommendation.json"} <= left
    assert {"pareto_latency.png", "pareto_size.png", "trajectory.png", "layers.png"} <= left
    table = rows_of(sweep / "summary.csv")
    assert [row["job"] for row in table] == JOBS and statuses(sweep) == ["done"] * 3
    sizes = [float(row["denoiser_onnx_bytes"]) for row in table]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    cache = unbroken_sweep / "cache"
    entries = {kind: len(list((cache / kind).glob("*/manifest.json"))) for kind in ("graph", "onnx", "images")}
    assert entries == {"graph": 3, "onnx": 3 + 3, "images": 2}  # torch's, and the unquantized engine's
    full = {(unbroken_sweep / "sweep" / job / "full_precision/onnx/unet/unet.onnx").stat().st_ino for job in JOBS}
    assert len(full) == 1


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


@pytest.mark.nightly
def test_killed_and_started_again_it_leaves_the_same(sweep):
    killed(sweep.begun())  # in the second job
    assert not (sweep.folder / JOBS[1] / "metrics.json").exists()
    assert "sweep of 2 jobs" in sweep.does_the_rest(JOBS[0])
    assert without_times(sweep.folder / "summary.csv") == sweep.undisturbed


@pytest.mark.nightly
def test_a_failed_job_stops_no_other_and_is_tried_again_and_one_of_another_input_is_done_again(
    unbroken_sweep, refused, done, sweep_arguments
):
    """The finished sweep gets a failed job and a record of another checkpoint."""
    sweep = unbroken_sweep / "sweep"
    (sweep / JOBS[1] / "metrics.json").unlink()
    lock = sweep / JOBS[1] / ".lock"
    lock.unlink()
    lock.mkdir()  # what the job opens first
    said = refused(*sweep_arguments(unbroken_sweep), code=1)
    assert said.startswith("1 of 3 jobs is not done (quant_level=2: ") and ".lock is no file" in said
    assert statuses(sweep) == ["done", "failed", "done"]
    assert ".lock is no file" in rows_of(sweep / "summary.csv")[1]["reason"]
    assert ".lock is no file" in (sweep / "report.html").read_text(encoding="utf-8")

    lock.rmdir()
    content = json_of(sweep / JOBS[0] / "metrics.json")
    (sweep / JOBS[0] / "metrics.json").write_text(json.dumps(content | {"fingerprint": "of another checkpoint"}))
    said = done(*sweep_arguments(unbroken_sweep)).stdout
    assert "2 done before, 1 failed before and tried again" in said
    assert "job 2 of 3: quant_level=2, failed before: " in said
    assert said.count("done before: nothing that this job depends on has changed") == 1
    assert said.count("\nrecipe ") == 1 and "fidelity to full precision" not in said  # one table
    assert statuses(sweep) == ["done"] * 3 and record_of(sweep / JOBS[0])["fingerprint"] == content["fingerprint"]


def test_the_report_is_made_again_from_the_records(unbroken_sweep, refused, done):
    sweep = unbroken_sweep / "sweep"
    before, files = (sweep / "summary.csv").read_bytes(), ("summary.csv", "report.html", "pareto_size.png")
    for name in files:
        (sweep / name).unlink()
    done("-m", "sd_quant.report", sweep)
    assert (sweep / "summary.csv").read_bytes() == before and all((sweep / name).exists() for name in files)
    done("-m", "sd_quant.report", sweep / JOBS[0])
    assert (sweep / JOBS[0] / "report.html").exists()
    said = refused("-m", "sd_quant.report", unbroken_sweep, code=3)
    assert said.startswith(f"{unbroken_sweep} holds neither sweep.json nor")
    assert not (unbroken_sweep / "report.html").exists()
