"""Work that goes on beside a job changes nothing: with one thread a job does one thing after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.places import CONF, HOME
from sd_quant.stages import export_onnx
from sd_quant.stages.quantize import quantize
from sd_quant.stages.trace_ahead import Tracer

from ..pipelines import sd15

JOB = (
    "quantize.py", "model=sd15", "model.width=64", "model.height=64", "calib_size=2", "quantize.n_steps=2",
    "infer.width=64", "infer.height=64", "infer.steps=2", "infer.prompts=[a cat,a dog]", "infer.num_timed_runs=3",
    "infer.num_warmup_runs=1", "timing.budget_s=0", "memory_of_parts=false",
    "export_trt=tensorrt_rtx", "trt.targets=[SM89]",
)  # fmt: skip


class Asked(Tracer):
    """A tracer that traces nothing and keeps what happens to it."""

    def __init__(self):
        super().__init__()
        self.parts, self.asked, self.happened = [], 0, []

    def trace(self, request):
        self.parts = request["parts"]
        self.happened.append("work")

    def busy(self):
        self.asked += 1
        return False

    def end(self):
        self.happened.append("end")


@pytest.mark.soak
def test_a_job_gives_its_tracer_work_and_asks_before_each_call_how_many_cores_it_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "several_threads", lambda: True)
    sd15(tmp_path / "model")
    (tmp_path / "run").mkdir()
    places = (f"model.path={tmp_path}/model", f"cache.dir={tmp_path}/cache", "export_trt=none")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        job = job_of(QuantizeJob, compose("quantize", [*JOB[1:-2], *places]))
    tracer, calls = Asked(), 2 * 3  # of two prompts, of which PNDM makes one more than steps
    quantize(job, tmp_path / "run", tracer)
    assert tracer.parts == ["unet", "vae", "text_encoder"] and tracer.happened == ["work", "end"]
    assert tracer.asked == calls + 2  # and as calibration and the framework's images begin


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """The folder of a job by its number of threads, each with a cache of its own."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
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


@pytest.mark.soak
@pytest.mark.needs(cores=2)
def test_the_files_are_the_same(runs):
    alone, beside = (sorted(path.relative_to(run) for path in run.glob("onnx/**/*.onnx")) for run in runs.values())
    assert alone == beside and len(alone) == 3
    assert all((runs[1] / path).read_bytes() == (runs[2] / path).read_bytes() for path in alone)
    rows = [(run / "layers.csv").read_text() for run in runs.values()]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) > 20


@pytest.mark.soak
def test_the_plans_and_images_are_there(runs):
    for run in runs.values():
        plans = record(run)["plans"]
        assert set(plans) == {"unet", "vae", "text_encoder"}
        assert all((run / "plan" / f"{part}.plan").stat().st_size == plan["bytes"] for part, plan in plans.items())
        assert len(record(run)["fidelity"]["psnr"]["values"]) == 2


@pytest.mark.soak
def test_plans_are_built_while_images_are_made_and_before_them_with_one_thread(runs):
    for threads, run in runs.items():
        log = (run / "quantize.log").read_text()
        assert (log.rindex("images ...") < log.index("plans: ")) == (threads == 2)
        assert log.index("plans: ") < log.index("latency ...") and log.index("parity: ") < log.index("latency ...")
    stages = record(runs[2])["stages"]
    assert record(runs[2])["seconds"] > max(stage["seconds"] for stage in stages.values())
    assert list(stages)[-1] == "latency"  # with nothing beside it
