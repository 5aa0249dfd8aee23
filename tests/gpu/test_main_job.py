"""The main job where torch computes on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sd_quant.places import HOME

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # minutes: make test has it, make gpu-check does not


@pytest.fixture(autouse=True)
def packages(gpu):
    for name in ("hydra", "modelopt", "lightning", "onnxscript", "openvino", "torchmetrics"):
        pytest.importorskip(name)


def run(directory: Path, *overrides: str, plans: str = "none") -> dict:
    knobs = "quant_level=3", f"export_trt={plans}", "calib_size=2", "quantize.n_steps=4", "infer.steps=4", *overrides
    command = [sys.executable, "quantize.py", *knobs, f"cache.dir={directory}/cache", f"hydra.run.dir={directory}/run"]
    result = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stderr
    return json.loads((directory / "run" / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("overrides", [
    ["infer=torch_native"],
    ["infer=torch_native", "quantize=fp8"],
    ["infer=torch_native", "infer.cuda_graph=true", "infer.precision=bf16"],
    ["infer=torch_compiled", "infer.cuda_graph=true"],
    ["infer=openvino"],
], ids=" ".join)  # fmt: skip
def test_the_job_runs_and_says_where(tmp_path, overrides):
    """Parity is held by the job itself: layer by layer, and the whole against the simulation's error."""
    record = run(tmp_path, *overrides)
    engine = record["knobs"]["infer"]["engine"]
    assert record["fidelity"]["psnr"]["mean"] > 20
    assert record["latency"]["torch"]["unet_xl"]["2"]["full_precision"]["clock"] == "cuda_events"
    quantized = record["latency"][engine]["unet_xl"]["2"]["quantized"]
    assert quantized["clock"] == ("wall_clock" if engine == "openvino" else "cuda_events")
    assert record["peak_cuda_memory_bytes"] > 2**20


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_the_layers_of_a_plan_are_compared_as_a_plan(tmp_path, library, fmt):
    pytest.importorskip(library, reason=f"{library} is not installed")
    record = run(tmp_path, f"quantize={fmt}", "trt.targets=[]", plans=library)
    assert record["knobs"]["infer"]["engine"] == library  # infer=auto
    assert record["parity"]["quantized_layers"]["count"] == record["layers"]["quantized"] == 150
    executed = record["executed"]
    assert executed["of"] == 150 and executed["count"] + len(executed["fell_back"]) + len(executed["unknown"]) == 150
