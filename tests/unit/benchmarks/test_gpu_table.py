"""The table of a GPU, made without one: what is in its rows is right, and no time in them means anything."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sd_quant.devices import CPU
from sd_quant.engines import load_engine
from sd_quant.engines.tensorrt.plan import describe_plan
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_table():
    spec = importlib.util.spec_from_file_location("gpu_table", BENCHMARKS / "gpu_table.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def part(gpu_table, small_config):
    return gpu_table.build(small_config, CPU, torch.float32)


@pytest.fixture(scope="module")
def rows(gpu_table, part) -> list[dict]:
    gpu_table.compiled = lambda part: part  # a minute for each side
    chosen = argparse.Namespace(batches=[1, 2], size=64, steps=2, repeats=2, levels=[1.0, 4.0], no_tries=False,
                                seconds=600, plan=[], out=None)  # fmt: skip
    with torch.no_grad():
        return list(gpu_table.rows_of(chosen, gpu_table.table_of(chosen, part, {}), {}))


def test_what_is_wanted_comes_first_and_for_every_batch(rows):
    wanted = ["fp16 eager", "fp16 compiled", "int8 level 3", "fp8 level 3"]
    assert [(row["side"], row["batch"]) for row in rows[:8]] == [(side, batch) for batch in (1, 2) for side in wanted]
    others = ["int8 level 1", "fp8 level 1", "fp8 level 4"]
    ways = ["int8 level 3, convolutions rounded", "int8 level 3, torch's products", "fp8 level 3, scales per row"]
    assert [(row["side"], row["batch"]) for row in rows[8:]] == [(side, 1) for side in others + ways]


def test_native_layers_cost_what_the_simulation_costs(rows):
    """Roundings that fall the other way change everything behind them, so the two errors are alike and not the same."""
    told = [row for row in rows if "simulation_error" in row]
    assert len(told) == 2
    for row in told:
        assert 0.5 < row["error"] / row["simulation_error"] < 2, row["side"]
    first = {row["side"]: row for row in rows if row["batch"] == 1}
    assert all(row["error"] < 0.2 for row in first.values() if "error" in row)
    for way in ("int8 level 3, convolutions rounded", "int8 level 3, torch's products"):
        assert first[way]["error"] == pytest.approx(first["int8 level 3"]["error"], rel=0.2)


def test_every_quantized_side_is_timed_against_both_baselines(rows):
    for row in rows:
        assert (row["over_compiled"] is None) == (row["side"] == "fp16 compiled")
        assert (row["over_eager"] is None) == (row["side"] == "fp16 eager")
        assert row["pictures_a_second"] == pytest.approx(1e3 * row["batch"] / row["loop_ms"])


def test_the_table_stands_beside_what_others_published(gpu_table, rows):
    kernels = {"fp16 compiled": [{"kernel": "gemm", "calls": 3, "ms": 1.5}]}
    text = gpu_table.markdown(rows, {"seconds": 1}, kernels)
    assert text.startswith("| side | batch | p50_ms |") and "- MLPerf Inference" in text
    assert "- 1.50 in 3: `gemm`" in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + len(rows)


@pytest.mark.parametrize("over_compiled, over_eager, word", [(1.4, 2.3, "reached"), (1.4, 2.1, "not reached")])
def test_the_verdict_is_of_the_fastest_quantized_side(gpu_table, over_compiled, over_eager, word):
    def row(side, batch, compiled, eager, rate):
        return {"side": side, "batch": batch, "over_compiled": compiled, "over_eager": eager, "pictures_a_second": rate}

    rows = [
        row("fp16 compiled", 1, None, 1.7, 2.0),
        row("int8 level 3", 1, 1.1, 1.9, 2.2),
        row("fp8 level 3", 1, over_compiled, over_eager, 2.8),
        row("fp8 level 3", 2, 1.2, 2.0, 2.9),
        row("TensorRT fp16", 1, 1.5, 2.5, 3.0),
    ]
    told = gpu_table.verdict(rows)
    assert told[0].startswith(f"batch 1: fp8 level 3 is the fastest quantized side, {over_compiled:.2f}x compiled")
    assert told[0].endswith(f"wanted 1.33x and 2.2x: {word}") and told[1].endswith("not reached")
    assert "fp8 level 3: at most 2.9 pictures a second, at batch 2" in told


@torch.no_grad()
def test_a_plan_is_built_of_what_the_table_measures(gpu_table, part, tmp_path):
    """Its ONNX by a runtime that is here; the plan for a GPU that is not."""
    inputs = gpu_table.inputs_of(part, 1, 64)
    known = gpu_table.assignment_of(part, gpu_table.statistics_of(part, inputs), gpu_table.RECIPES["int8"])
    more = {"library": "tensorrt_rtx", "compute_capabilities": ["SM89"], "timing_cache": None}
    plan = gpu_table.build_plan_of(part, known, tmp_path / "made", [1, 2], 64, **more)
    assert describe_plan(plan)["complete"]
    found = load_engine("onnxruntime", plan.with_suffix(".onnx"))(**inputs)["out"].float()
    assert relative_error(part(**inputs), found) < 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stdout.splitlines()[-1].startswith("there is no NVIDIA GPU")
    assert not (tmp_path / "out").exists()
