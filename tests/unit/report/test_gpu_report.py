"""The file that owners of GPUs send: its figures are those of the runs' records, and contradictions are refused."""

import json

import pytest

from benchmarks.gpu import reports
from sd_quant.engines.gpu import TAKE_FP8
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.places import HOME
from sd_quant.report.gpu_report import MOST_BYTES, SCHEMA, read_report, row_of, without_names
from sd_quant.report.recommendation import recommend
from sd_quant.report.record import read_record
from sd_quant.report.summary import read_sweep
from sd_quant.report.warnings import warnings_of_run
from tests.nested import with_values

from .sweeps import change_record, latency_of, record_of_plan, write_job

pytestmark = pytest.mark.commit


def report(**changes) -> bytes:
    """A report of one row; ``changes`` by the dotted names of its values."""
    row = {"checkpoint": "full", "engine": "tensorrt", "format": "fp8", **row_of(record_of_plan(), "tensorrt")}
    gpu = {"name": "NVIDIA H20", "compute_capability": "9.0", "memory": "96 GB", "driver": "1", "clocks": {}}
    whole = {
        "schema": SCHEMA, "made_by": "sd-quant gpu-report", "day": "2026-12-01", "rehearsal": False, "gpu": gpu,
        "processor": "a processor", "cores": 16, "versions": {"torch": "2.13.0", "tensorrt_rtx": None}, "rows": [row],
    }  # fmt: skip
    return json.dumps(with_values(whole, changes)).encode()


def test_a_row_has_the_figures_of_its_record_of_plan():
    [row] = read_report(report(), "r.json").rows
    assert (row.denoiser.full_precision_ms, row.denoiser.quantized_ms) == (20.0, pytest.approx(10.0))
    assert row.denoiser.over_full_precision.value == pytest.approx(2.0)
    assert row.denoiser.over_compiled.value == pytest.approx(2.4, rel=0.01)
    assert row.denoiser.over_compiled.low < 2.4 < row.denoiser.over_compiled.high
    assert (row.image_ms, row.psnr_db, row.executed, row.plan_bytes, row.steps) == (40.0, 35.0, 5, 34, 20)
    assert [each.what for each in row.parity] == ["vae with torch"]
    made = record_of_plan()
    made["latency"]["torch_compiled"] = made["latency"].pop("tensorrt")
    denoiser = row_of(made, "torch_compiled")["denoiser"]  # whose unquantized engine is the baseline
    assert (denoiser["compiled_ms"], denoiser["over_compiled"]["value"]) == (20.0, pytest.approx(2.0, rel=0.01))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"schema": "sd-quant gpu report 0"}, "schema: Input should be 'sd-quant gpu report 1'"),
        ({"rows.0.denoiser.over_compiled.value": 2.9}, "over_compiled.*2.9 is outside of its interval"),
        ({"rows.0.denoiser.over_compiled": {"value": 2.9, "low": 2.8, "high": 3.0}},
         "over_compiled is 2.9, and its latencies, 24 and 10 ms, give 2.4"),
        ({"rows.0.denoiser.quantized_ms": 0.0}, "quantized_ms: Input should be greater than 0"),
        ({"rows.0.reason": "no /home/ada/plan"}, "holds the path or address /home/ada/plan"),
        ({"rows.0.prompts": ["a red apple"]}, "rows.0.prompts: Extra inputs are not permitted"),
        ({"rows.0.parity.0.relative_error": 0.1}, "vae with torch has an error of 0.1, more than 0.001"),
        ({"gpu.name": "H20](x) |"}, "gpu.name: String should match pattern"),
        ({"gpu.name": "H20\n# Title"}, "gpu.name: String should match pattern"),
        ({"rows.0.format": "a | b"}, "format: String should match pattern"),
        ({"rows.0.denoiser": None}, "a row that is done has no latency"),
        ({"rows": []}, "rows: List should have at least 1 item"),
        ({"cores": "sixteen"}, "cores: Input should be a valid integer"),
        *((damaged, "") for damaged in (b"", b"[1]", b"\xff", b'{"schema": NaN}', b"[" * 100_000)),
        (report() + b" " * MOST_BYTES, "r.json is larger than 1000000 bytes"),
        (report(rehearsal=True), "a rehearsal without a GPU"),
        (report(**{"rows.0.checkpoint": "mini"}), "no row of the full size"),
    ],
)  # fmt: skip
def test_a_report_that_is_wrong_or_has_no_figure_for_the_table_is_refused_by_name(tmp_path, content, words):
    (tmp_path / "r.json").write_bytes(report(**content) if isinstance(content, dict) else content)
    if isinstance(content, dict) or not words:
        words = f"r.json is no report of {SCHEMA}: .*{words}.*make it again"
    with pytest.raises((ArtifactError, ConfigError), match=words):
        reports.add(tmp_path / "r.json", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_an_added_report_is_a_row_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "HOME", tmp_path)
    (tmp_path / "r.json").write_bytes(report())
    kept = reports.add(tmp_path / "r.json", tmp_path)
    (tmp_path / "r.json").unlink()
    text = reports.with_rows("| a |\n| NVIDIA Turing |\n", tmp_path)
    assert kept.name == "nvidia_h20.json" and text.splitlines()[0::2] == ["| a |", "| NVIDIA Turing |"]
    line = text.splitlines()[1]
    assert line.startswith("| [NVIDIA H20](nvidia_h20.json) | `quantize=fp8`, `infer=tensorrt` | SDXL's UNet over")
    assert "`tensorrt`: fp8 2.40x (2." in line and "10.0 ms (`sd-quant gpu-report`, 2026-12-01) |" in line


def test_the_readme_has_the_rows_of_the_reports_that_are_kept():
    text, kept = (HOME / "README.md").read_text(encoding="utf-8"), [*reports.RESULTS.iterdir()]
    assert reports.with_rows(text) == text and text.count("(benchmarks/results/gpu/") == len(kept)


def test_an_errors_line_loses_paths_addresses_and_names():
    line = "error: /home/ada/a.plan of ada@babbage on babbage, ..\\x and ~/y is broken"
    assert without_names(line, ["babbage", "ada"]) == "error: <path> of <path> on <name>, <path> and <path> is broken"


HOPPER = {
    "environment.machine.compute_capabilities": ["SM90"], "knobs.infer.engine": "torch_compiled",
    "knobs.quant_level": 3.0, "knobs.enable": {"conv": {"activation": "int8"}, "linear": {"activation": "int8"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, True),
        ({"environment.machine.compute_capabilities": ["SM89", "SM90"]}, False),
        ({"knobs.infer.engine": "openvino"}, False),
        ({"knobs.quant_level": 0.0}, False),
        ({"knobs.enable": {"conv": {"activation": "fp8"}, "linear": {"activation": None}}}, False),
    ],
)
def test_int8_on_hopper_is_told_to_be_fp8_and_is_not_recommended(tmp_path, changes, told):
    changes = HOPPER | changes
    engine = changes["knobs.infer.engine"]
    changes["latency"] = {engine: latency_of(1.3)["openvino"]}
    folder = change_record(write_job(tmp_path / "run"), changes)
    assert (f"FORMAT: {TAKE_FP8}." in warnings_of_run(read_record(folder), [engine], [])) is told
    recommended = recommend(read_sweep(folder))
    assert (TAKE_FP8 in recommended.sentence) is told and (recommended.job is None) is told
