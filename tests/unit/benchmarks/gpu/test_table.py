"""The table without a GPU: its verdict, its doubts and a plan of what it measures. No time in it means anything."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import plans, sides, table, worker
from benchmarks.gpu.network import inputs_of
from sd_quant.engines import load_engine
from sd_quant.engines.tensorrt.plan import describe_plan
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.commit


def row(name: str, batch: int, compiled: float, eager: float, **more) -> dict:
    return {
        "name": name, "network": "sdxl", "batch": batch, "ended": "done", "p50_ms": 1.0, "recipe": name, "seconds": 1.0,
        "over_compiled": compiled, "over_compiled_interval": [compiled - 0.01, compiled + 0.01],
        "over_eager": eager, "over_eager_interval": [eager - 0.01, eager + 0.01],
    } | more  # fmt: skip


@pytest.mark.parametrize("compiled, eager, word", [
    (1.4, 2.3, "reached"), (1.4, 1.9, "not reached"), (1.3, 2.3, "not reached"),
])  # fmt: skip
def test_the_verdict_is_of_the_fastest_quantized_row(compiled, eager, word):
    rows = [
        row("fp16 compiled", 1, 1.0, 1.7, recipe=None),
        row("int8 level 3", 1, 1.1, 1.9),
        row("fp8 level 3", 1, compiled, eager),
        row("fp8 level 3", 2, 1.2, 2.0),
        row("flux fp8 level 3", 1, 1.6, 2.4, network="flux"),
        {"name": "pictures", "ended": "done", "seconds_a_picture": 0.7, "compiled_seconds_a_picture": 0.9, "steps": 30},
        {"name": "one that hangs", "ended": "late", "reason": "no answer in 60 s"},
    ]
    first, second, of_flux, third = table.verdict(rows)
    assert first.startswith(f"batch 1: fp8 level 3 is the fastest quantized row, {compiled:.2f}x (")
    assert first.endswith(f"wanted 1.35x and 2.0x: {word}") and second.endswith("not reached")
    assert (
        of_flux == "batch 1: flux fp8 level 3 is the fastest quantized row, 1.60x (1.59 to 1.61) the speed of "
        "compiled bf16 and 2.40x (2.39 to 2.41) that of eager"
    )
    assert third == "pictures: 0.70 s a picture of 30 steps, compiled fp16 0.90 s; wanted 0.75 s: reached"
    text = table.markdown(rows, {"machine": "none"})
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + 5
    assert "- one that hangs: late, no answer in 60 s" in text and "- MLPerf Inference" in text


@pytest.mark.parametrize("side, said, doubt", [
    ("fp8 level 3", {"error": 0.1, "simulation_error": 0.05}, "its error is 2 times that of its recipe"),
    ("fp8 level 3", {"error": float("nan"), "simulation_error": 0.05}, "its error is nan times"),
    ("fp8 level 3", {"error": 0, "simulation_error": 0.1, "share_of_fp8_peak": 1.2}, "share_of_fp8_peak is 1.20"),
    ("int8 level 3", {"error": 0.05, "simulation_error": 0.05, "kernels": [{"kernel": "ampere_fp16_s1688gemm"}]},
     "none of its longest kernels multiplies codes"),
    ("flux fp8 level 3", {"error": 0.1, "simulation_error": 0.05}, "its error is 2 times that of its recipe"),
    ("flux fp8 level 3", {"error": 0, "simulation_error": 1, "kernels": [{"kernel": "nvjet_tst_128x256_TNT"}]},
     "none of its longest kernels multiplies codes"),
    ("fp16 compiled", {"error": 0.1}, "it differs from eager by 0.1"),
    ("fp16 compiled", {"share_of_fp16_peak": 1.1}, "share_of_fp16_peak is 1.10"),
])  # fmt: skip
def test_what_cannot_be_is_doubted(side, said, doubt):
    assert [found[: len(doubt)] for found in worker.doubts_of(sides.SIDES[side], said)] == [doubt]
    wide = "nvjet_sm90_qqtst_192x192_128x4_1x2_h_bz_coopB_bias_TNN", "cutlass_tensorop_i16832gemm_s8"
    for name in ("product_kernel", "sm90_xmma_gemm_e4m3e4m3_f32", "nvjet_qqtst_128x256_TNT", *wide):
        may_be = {"error": 0.06, "simulation_error": 0.05, "share_of_fp16_peak": 1.06, "kernels": [{"kernel": name}]}
        assert worker.doubts_of(sides.SIDES["fp8 level 3"], may_be) == []


@pytest.mark.release
@torch.no_grad()
def test_a_plan_is_built_of_what_the_table_measures(unet, assignments, tmp_path: Path):
    """Its ONNX by a runtime that is here; the plan for a GPU that is not."""
    inputs = inputs_of(unet, 1, 64)
    more = {"compute_capabilities": ["SM89"]}
    plan = plans.built_plan(unet, assignments["int8 level 3"], "tensorrt_rtx", 1, 64, tmp_path / "made", **more)
    assert describe_plan(plan)["complete"]
    found = load_engine("onnxruntime", plan.with_suffix(".onnx"))(**inputs)["out"].float()
    assert relative_error(unet.module(**inputs), found) < 0.1
