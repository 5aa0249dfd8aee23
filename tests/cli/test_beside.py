"""Work that goes on beside a job changes nothing: with one thread a job does one thing after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_quant.places import HOME

from ..pipelines import sd15

JOB = (
    "quantize.py", "model=sd15", "model.width=64", "model.height=64", "calib_size=2", "quantize.n_steps=2",
    "infer.width=64", "infer.height=64", "infer.steps=2", "infer.prompts=[a cat,a dog]", "infer.num_timed_runs=3",
    "infer.num_warmup_runs=1", "timing.budget_s=0", "export_trt=tensorrt_rtx", "trt.targets=[SM89]",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The folder of a job by its number of threads, each with a cache of its own."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core has no room for two threads")
    folder = tmp_path_factory.mktemp("beside")
    sd15(folder / "model")
    for threads in (1, 2):
        places = (
            f"model.path={folder}/model",
            f"cache.dir={folder}/cache{threads}",
            f"hydra.run.dir={folder}/{threads}",
        )
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, *JOB, *places], cwd=HOME, env=environment, check=True, capture_output=True)
    return {threads: folder / str(threads) for threads in (1, 2)}


def record(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def test_the_files_are_the_same(runs):
    alone, beside = (sorted(path.relative_to(run) for path in run.glob("onnx/**/*.onnx")) for run in runs.values())
    assert alone == beside and len(alone) == 3
    assert all((runs[1] / path).read_bytes() == (runs[2] / path).read_bytes() for path in alone)
    rows = [(run / "layers.csv").read_text() for run in runs.values()]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) > 20


def test_the_plans_and_images_are_there(runs):
    for run in runs.values():
        plans = record(run)["plans"]
        assert set(plans) == {"unet", "vae", "text_encoder"}
        assert all((run / "plan" / f"{part}.plan").stat().st_size == plan["bytes"] for part, plan in plans.items())
    alone, beside = (record(run)["fidelity"]["psnr"]["values"] for run in runs.values())
    assert beside == pytest.approx(alone, abs=0.2)  # last bits move inputs to other codes


def test_the_graphs_came_from_the_process_and_the_plans_from_the_thread(runs):
    logs = {threads: (run / "quantize.log").read_text() for threads, run in runs.items()}
    assert "graph of unet comes from the cache" in logs[2]
    order = {threads: [log.index(f"{stage} ...") for stage in ("parity", "plans")] for threads, log in logs.items()}
    assert order[1][0] > order[1][1] and order[2][0] > order[2][1]
    assert logs[1].index("plans: ") < logs[1].index("parity ...")
    stages = record(runs[2])["stages"]
    assert record(runs[2])["seconds"] > max(stage["seconds"] for stage in stages.values())
    assert list(stages).index("latency") == len(stages) - 1  # with nothing beside it
