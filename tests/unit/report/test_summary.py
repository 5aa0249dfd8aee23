"""A sweep's table, from nothing but its folder."""

import csv
import json

import pytest
from pyarrow import parquet

from sd_quant.cache import locked
from sd_quant.errors import ArtifactError
from sd_quant.files import write_json
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE, LOCK, LOG, SWEEP, WAS_CANCELLED, read_sweep, write_parquet, write_summary
from sd_quant.report.table import write_csv

from .sweeps import change_record, write_job, write_plan

pytestmark = pytest.mark.commit


@pytest.fixture
def folder(tmp_path):
    """Four jobs: two done, one failed, one that never ran."""
    names = {f"alpha={alpha}": {"alpha": alpha} for alpha in (0.5, "auto", 1.0, 0.1)}
    write_job(tmp_path / "alpha=0.5", 30.0, 1.5)
    write_job(tmp_path / "alpha=auto", 35.0, 1.2)
    (tmp_path / "alpha=1.0").mkdir()
    write_json(tmp_path / "alpha=1.0" / FAILURE, {"reason": "=cmd|' /C calc'!A0 <b>| broken"})
    write_plan(tmp_path, names)
    return tmp_path


def test_a_row_has_what_its_record_says(folder):
    first = read_sweep(folder).rows[0]
    expected = {
        "job": "alpha=0.5", "status": "done", "reason": None, "alpha": 0.5, "psnr_db": 30.0, "psnr_worst_db": 29.95,
        "latent_sqnr_db": 21.0, "denoiser_ms": 10.0, "denoiser_speedup": 2.0, "image_ms": 40.0, "image_torch_ms": 800.0,
        "denoiser_onnx_bytes": 10.2e6, "denoiser_plan_bytes": 3e7, "quantized_layers": 5, "seconds": 12.5,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected


@pytest.mark.parametrize(
    "values, ends", [([30.0, 40.0], [0, 98.53]), ([30.0], [None] * 2), ([30.0, None], [None] * 2), ([], [None] * 2)]
)
def test_ends_of_psnr_are_possible_or_unknown(folder, values, ends):
    change_record(folder / "alpha=0.5", {"fidelity.psnr.values": values})
    first = read_sweep(folder).rows[0]
    assert [first["psnr_db_low"], first["psnr_db_high"]] == [each and pytest.approx(each, abs=0.01) for each in ends]


def test_the_denoiser_keeps_its_interval_where_an_image_has_no_figure(folder):
    none = {"p50_ms": None, "reason": "a second or more is missing", "rest": None}
    change_record(folder / "alpha=0.5", {"latency.openvino.image.1": {"full_precision": none, "quantized": none}})
    first = read_sweep(folder).rows[0]
    assert first["denoiser_speedup_low"] < first["denoiser_speedup"] < first["denoiser_speedup_high"]
    assert first["image_speedup"] is None is first["image_speedup_low"]


def test_a_job_that_left_nothing_is_running_was_killed_or_cancelled(folder):
    """The process that holds its lock may be this one: a lock belongs to the file as it was opened."""
    killed = folder / "alpha=0.1"
    killed.mkdir()
    log = "[2026-01-01 00:00:00,000][sd_quant][INFO] - {} ...\n"
    (killed / LOG).write_text("".join(log.format(stage) for stage in ("load", "export")))
    with locked(killed / LOCK):
        assert read_sweep(folder).rows[3]["reason"] == "it left no record: it is running in the stage export"
    reason = read_sweep(folder).rows[3]["reason"]
    assert reason.startswith("it left no record: it ended in the stage export without an error message")
    with (killed / LOG).open("a") as log:
        log.write(f"[2026-01-01 00:00:01,000][sd_quant.cli][WARNING] - the job {WAS_CANCELLED}\n")
    reason = read_sweep(folder).rows[3]["reason"]
    assert reason == f"it left no record: it {WAS_CANCELLED} in the stage export; the same command goes on"


def test_the_three_files_agree(folder):
    write_summary(read_sweep(folder))
    with (folder / "summary.csv").open(newline="") as file:
        text = list(csv.DictReader(file))
    table = parquet.read_table(folder / "summary.parquet").to_pylist()
    assert [row["job"] for row in text] == [row["job"] for row in table]
    assert [row["alpha"] for row in table] == ["0.5", "auto", "1.0", "0.1"]  # one type a column
    assert [float(row["psnr_db"]) for row in text[:2]] == [row["psnr_db"] for row in table[:2]] == [30.0, 35.0]
    assert text[2]["reason"].startswith("'=cmd")  # no spreadsheet runs it
    lines = (folder / "summary.md").read_text().splitlines()
    assert lines[2].startswith("| 0.5 | done | 30.00 ± 0.64 | 29.95 | 0.9800 | 0.0100 | 21.0 | 10.0 | 2.00x")
    assert r"\<b\>\| broken" in lines[-2] and all(line.count(" | ") == lines[0].count(" | ") for line in lines[:6])


@pytest.mark.parametrize(
    ("text", "why"), [("\udcff", ""), ('{"status": "done", "sizes_bytes": {"vae": 7}}', "sizes_bytes.vae is 7")]
)
def test_a_damaged_record_is_an_unfinished_job(folder, text, why):
    (folder / "alpha=0.5" / RECORD).write_text(text, errors="surrogateescape")
    job = read_sweep(folder).jobs[0]
    assert job.status == "unfinished" and job.reason.startswith("its record cannot be read") and why in job.reason


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("jobs"),
        lambda plan: plan.update(jobs=3),
        lambda plan: plan["jobs"][0].update(name="../elsewhere"),
        lambda plan: plan["jobs"][0].update(name=""),
        lambda plan: plan["jobs"][0].update(varied=None),
    ],
)
def test_a_plan_that_is_none_is_refused(folder, change):
    plan = json.loads((folder / SWEEP).read_text())
    change(plan)
    write_json(folder / SWEEP, plan)
    with pytest.raises(ArtifactError, match="is not the plan of a sweep"):
        read_sweep(folder)


def test_text_that_starts_a_formula_is_disarmed(tmp_path):
    formulas = [f"{start}cmd|' /C calc'!A0" for start in "=+-@\t\r"]
    write_csv([{"name": formula} for formula in formulas], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [f"'{formula}" for formula in formulas]


def test_a_table_has_the_columns_of_all_its_rows_and_a_seed_may_be_larger_than_parquets_numbers(tmp_path):
    """Columns are in order of first appearance."""
    rows = [{"name": "a", "int8": 8, "seed": 7}, {"name": "b", "int4": 4, "int8": 8, "seed": 2**63 - 1}]
    write_csv(rows, tmp_path / "a.csv")
    lines = [b"name,int8,seed,int4", b"a,8,7,", b"b,8,9223372036854775807,4", b""]
    assert (tmp_path / "a.csv").read_bytes() == b"\r\n".join(lines)
    for seed, stored in ((2**63 - 1, [7, 2**63 - 1]), (2**64 - 1, ["7", f"{2**64 - 1}"])):
        rows[1]["seed"] = seed
        write_parquet(rows, tmp_path / "a.parquet")
        first, second = parquet.read_table(tmp_path / "a.parquet").to_pylist()
        assert [first.pop("seed"), second.pop("seed")] == stored
        assert (first, second) == ({"name": "a", "int8": 8, "int4": None}, {"name": "b", "int8": 8, "int4": 4})
