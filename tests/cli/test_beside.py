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

pytestmark = pytest.mark.commit

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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.needs(cores=2)
def test_the_files_are_the_same(runs):
    alone, beside = (sorted(path.relative_to(run) for path in run.glob("onnx/**/*.onnx")) for run in runs.values())
    assert alone == beside and len(alone) == 3
    assert all((runs[1] / path).read_bytes() == (runs[2] / path).read_bytes() for path in alone)
    rows = [(run / "layers.csv").read_text() for run in runs.values()]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) > 20


@pytest.mark.nightly
def test_the_plans_and_images_are_there(runs):
    for run in runs.values():
        plans = record(run)["plans"]
        assert set(plans) == {"unet", "vae", "text_encoder"}
        assert all((run / "plan" / f"{part}.plan").stat().st_size == plan["bytes"] for part, plan in plans.items())
        assert len(record(run)["fidelity"]["psnr"]["values"]) == 2


@pytest.mark.nightly
def test_plans_are_built_while_images_are_made_and_before_them_with_one_thread(runs):
    for threads, run in runs.items():
        log = (run / "quantize.log").read_text()
        assert (log.rindex("images ...") < log.index("plans: ")) == (threads == 2)
        assert log.index("plans: ") < log.index("latency ...") and log.index("parity: ") < log.index("latency ...")
    stages = record(runs[2])["stages"]
    assert record(runs[2])["seconds"] > max(stage["seconds"] for stage in stages.values())
    assert list(stages)[-1] == "latency"  # with nothing beside it


SCRIPT = """
import sys, time
from pathlib import Path
from sd_quant.errors import ResourceError
from sd_quant.stages import export_trt

build_plans = export_trt.build_plans

def build(paths, out, *rest):
    if out.name == "quant_level=2":  # waits for the next job
        for _ in range(600):
            if (out.parent / "quant_level=2.5" / "config.yaml").exists():
                break
            time.sleep(0.1)
        else:
            raise ResourceError("the next job has not begun")
    if out.name == "quant_level=2.5":
        raise ResourceError("no plan for this one")
    return build_plans(paths, out, *rest)

export_trt.build_plans = build
from sd_quant.commands.quantize import main
main()
"""


@pytest.mark.nightly
@pytest.mark.needs(cores=2)
def test_plans_of_a_sweep_are_built_beside_the_next_job_and_fail_alone(tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    sd15(tmp_path / "model")
    (tmp_path / "patched.py").write_text(SCRIPT)
    places = (f"model.path={tmp_path}/model", f"cache.dir={tmp_path}/cache", f"hydra.sweep.dir={tmp_path}/sweep")
    sweep = ["-m", *JOB[1:], "quant_level=1,2,2.5,3", *places]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(HOME)}
    command = [sys.executable, str(tmp_path / "patched.py"), *sweep]
    ended = subprocess.run(command, cwd=HOME, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 1 and "quant_level=2.5: no plan for this one" in ended.stderr, ended.stderr[-3000:]
    records = {
        job: tmp_path / "sweep" / job / "metrics.json" for job in ("quant_level=1", "quant_level=2", "quant_level=3")
    }
    assert all(path.exists() for path in records.values())
    failure = json.loads((tmp_path / "sweep/quant_level=2.5/failure.json").read_text())
    assert failure["reason"] == "no plan for this one"
    said = ended.stdout
    assert (
        said.index("job 3 of 4")
        < said.index("quant_level=2: unet.plan")
        < said.index("done: quant_level=2,".rstrip(","))
    )
    timed = {job: record(path.parent)["latency"]["openvino"] for job, path in records.items()}
    assert "of_job" not in timed["quant_level=1"]["image"]["1"]["full_precision"]
    for job in ("quant_level=2", "quant_level=3"):
        assert timed[job]["image"]["1"]["full_precision"]["of_job"] == "quant_level=1"
        assert timed[job]["unet"]["2"]["quantized"]["p50_ms"] > 0 and timed[job]["image"]["1"]["speedup"] > 0

    ended = subprocess.run(
        [sys.executable, "quantize.py", *sweep], cwd=HOME, env=environment, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0 and "3 done before, 1 failed before and tried again" in ended.stdout
