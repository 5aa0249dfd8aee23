"""Other formats than INT8 through the command line: run where an engine can, else simulated and said to be."""

import csv
import json
from pathlib import Path

import onnx
import pytest

SWEEP = {"fp8": "FLOAT8E4M3FN", "svdquant_w4a16": "INT4", "nvfp4": "FLOAT4E2M1"}  # and the type of its weights
SIMULATED = {"nvfp4"}


@pytest.fixture(scope="module")
def arguments(main_job, checkpoint) -> list[str]:
    """What these jobs share with the main job comes from its cache."""
    return [
        "calib_size=4", "quantize.n_steps=5", f"model.path={checkpoint}",
        f"cache.dir={main_job.cache}", f"infer.prompts=[{','.join(main_job.prompts)}]",
        *main_job.sampling, "timing.budget_s=0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def sweep(command, arguments, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "sweep"
    presets = f"quantize={','.join(SWEEP)}"
    result = command("quantize.py", "-m", presets, "quant_level=3", *arguments, f"hydra.sweep.dir={folder}")
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def record_of(directory: Path) -> dict:
    return json.loads((directory / "metrics.json").read_text())


def weight_types(directory: Path) -> set[str]:
    graph = onnx.load(directory / "onnx/unet_xl/unet_xl.onnx", load_external_data=False).graph
    return {onnx.TensorProto.DataType.Name(weight.data_type) for weight in graph.initializer if len(weight.dims) > 1}


@pytest.mark.parametrize("preset", SWEEP)
def test_each_file_has_the_formats_own_type_and_is_valid(sweep, preset):
    directory = sweep / f"quantize={preset}"
    assert SWEEP[preset] in weight_types(directory) and "INT8" not in weight_types(directory)
    onnx.checker.check_model(directory / "onnx/unet_xl/unet_xl.onnx", full_check=True)


@pytest.mark.parametrize("preset", SWEEP)
def test_an_engine_runs_it_as_the_simulation_says_or_nothing_is_timed(sweep, preset):
    record = record_of(sweep / f"quantize={preset}")
    unet, image = record["latency"]["openvino"]["unet_xl"]["2"], record["latency"]["openvino"]["image"]["1"]
    assert record["simulated"] == (preset in SIMULATED)
    if record["simulated"]:
        assert "OpenVINO takes no QuantizeLinear" in record["simulated_because"]
        for found in (unet, image):
            assert found["quantized"]["p50_ms"] is None and found["quantized"]["reason"].startswith("simulated: ")
            assert found["full_precision"]["p50_ms"] > 0 and "speedup" not in found
        assert "quantized_layers" not in record["parity"]
    else:
        assert unet["quantized"]["p50_ms"] > 0 and image["quantized"]["p50_ms"] > 0
        assert record["parity"]["quantized_layers"]["count"] == record["layers"]["quantized"] == 150
    assert 15 < record["fidelity"]["psnr"]["mean"] < 50


def test_the_table_says_who_made_the_pictures_and_what_the_plans_are_for(sweep):
    with (sweep / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["quantize"]: row for row in csv.DictReader(file)}
    found = {
        name: (row["run_by"], row["denoiser_plan_targets"], row["denoiser_ms"] != "") for name, row in rows.items()
    }
    assert found == {
        "fp8": ("openvino", "SM89 SM120", True),
        "svdquant_w4a16": ("openvino", "SM89 SM120", True),
        "nvfp4": ("simulation", "SM120", False),
    }
    assert all((sweep / f"quantize={name}" / "plan/unet_xl.plan").stat().st_size > 1e6 for name in rows)
    assert float(rows["svdquant_w4a16"]["denoiser_onnx_share"]) < 0.2  # of fp32, scales and low-rank branch included


def test_attention_is_quantized_at_level_4(command, arguments, tmp_path):
    directory = tmp_path / "run"
    result = command("quantize.py", "quantize=fp8", "quant_level=4", "export_trt=none", *arguments,
                     f"hydra.run.dir={directory}")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    with (directory / "layers.csv").open(newline="") as file:
        attention = [row for row in csv.DictReader(file) if row["role"] == "attention"]
    assert len(attention) == 22 and all(row["activation_format"] == "fp8" and not row["reason"] for row in attention)
    graph = onnx.load(directory / "onnx/unet_xl/unet_xl.onnx").graph
    quantizers = [node.name for node in graph.node if node.op_type == "QuantizeLinear"]
    for what in ("query", "key", "value", "softmax"):
        assert sum(name.endswith(f".{what}_quantized") for name in quantizers) == 22


def test_onnxruntime_runs_inputs_in_int4_as_the_simulation_does(command, arguments, tmp_path):
    directory = tmp_path / "run"
    result = command("quantize.py", "quantize=svdquant_w4a4", "quant_level=3", "infer=onnxruntime", "export_trt=none",
                     *arguments, f"hydra.run.dir={directory}")  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    record = record_of(directory)
    excluded = 14  # proj_in and proj_out
    assert record["simulated"] is False and record["parity"]["quantized_layers"]["count"] == 150 - excluded


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["quantize=int8_per_tensor", "quant_level=4"],
            "quant_level is 4.0, expected at most 3, because int8_per_tensor has no format for",
        ),
        (
            ["quantize=svdquant_w4a4", "quantize.rank=300"],
            "quantize.rank is 300, expected at most 128, the shorter side",
        ),
        (["quantize=nvfp4", "trt.targets=[SM89]"], "trt.targets is SM89, expected one of SM120, SM121, because older"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(command, arguments, tmp_path, given, sentence):
    result = command("quantize.py", *given, *arguments, f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {sentence}")
    assert "calibrate ..." not in result.stdout
