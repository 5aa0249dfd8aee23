"""The table of a GPU, made without one: what is in its rows is right, and no time in them means anything."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
def rows(gpu_table, small_config) -> list[dict]:
    gpu_table.compiled = lambda part: part  # a minute for each side
    chosen = argparse.Namespace(batches=[1, 2], size=64, steps=2, repeats=2, levels=[1.0, 3.0], seconds=600, plan=[])
    with torch.no_grad():
        return list(gpu_table.rows_of(chosen, gpu_table.build(small_config, "cpu", torch.float32)))


def test_every_side_has_a_row_for_every_batch(rows):
    expected = ["fp16 eager", "fp16 compiled", "int8 level 3", "int8 level 1", "fp8 level 3", "fp8 level 1"]
    assert [row["side"] for row in rows if row["batch"] == 1] == expected
    assert [row["side"] for row in rows if row["batch"] == 2] == [name for name in expected if "level 1" not in name]


def test_native_layers_cost_what_the_simulation_costs(rows):
    """Roundings that fall the other way change everything behind them, so the two errors are alike and not the same."""
    for row in rows:
        if "simulation_error" in row:
            assert 0.5 < row["error"] / row["simulation_error"] < 2, row["side"]
    first = {row["side"]: row for row in rows if row["batch"] == 1}
    assert first["int8 level 1"]["error"] < first["int8 level 3"]["error"] < 0.2


def test_every_quantized_side_is_timed_against_the_compiled_one(rows):
    assert all((row.get("times_as_fast_as_compiled") is None) == row["side"].startswith("fp16") for row in rows)
    assert all(row["pictures_a_second"] == pytest.approx(1e3 * row["batch"] / row["loop_ms"]) for row in rows)


def test_the_table_stands_beside_what_others_published(gpu_table, rows):
    text = gpu_table.markdown(rows, {"seconds": 1})
    assert text.startswith("| side | batch | p50_ms |") and "- MLPerf Inference" in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.splitlines()[-1].startswith("there is no NVIDIA GPU")
    assert not (tmp_path / "out").exists()
