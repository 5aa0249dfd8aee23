"""Work that goes on beside a job changes nothing: with one thread a job does one thing after the other."""

import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.places import CONF, HOME
from sd_quant.stages import export_onnx
from sd_quant.stages.quantize import quantize
from sd_quant.stages.trace_ahead import Tracer

from ..zoo.families import sd15_of_one_level
from .shared import QUICK, record_of

pytestmark = pytest.mark.nightly

IMAGES = ("model=sd15", "model.width=64", "model.height=64", "infer.width=64", "infer.height=64", *QUICK,
          "infer.prompts=[a cat,a dog]")  # fmt: skip
PLANS = ("infer.num_timed_runs=3", "infer.num_warmup_runs=1", "export_trt=tensorrt_rtx", "trt.targets=[SM89]")


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


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "sd15"
    sd15_of_one_level(folder)
    return f"model.path={folder}"


def test_a_job_gives_its_tracer_work_and_asks_before_each_call_how_many_cores_it_leaves(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "several_threads", lambda: True)
    (tmp_path / "run").mkdir()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        job = job_of(QuantizeJob, compose("quantize", [*IMAGES, model, f"cache.dir={tmp_path}/cache"]))
    tracer, calls = Asked(), 2 * 3  # of two prompts, of which PNDM makes one more than steps
    quantize(job, tmp_path / "run", tracer)
    assert tracer.parts == ["unet", "vae", "text_encoder"] and tracer.happened == ["work", "end"]
    assert tracer.asked == calls + 2  # and as calibration and the framework's images begin


@pytest.mark.needs(cores=2)
def test_files_are_the_same_and_plans_are_built_while_images_are_made_and_before_them_with_one_thread(model, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    runs = {threads: tmp_path / str(threads) for threads in (1, 2)}  # each with a cache of its own
    for threads, run in runs.items():
        command = [sys.executable, "quantize.py", *IMAGES, *PLANS, model, f"cache.dir={run}_cache"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, f"hydra.run.dir={run}"], cwd=HOME, env=environment, check=True, capture_output=True)
    alone, beside = (sorted(path.relative_to(run) for path in run.glob("onnx/**/*.onnx")) for run in runs.values())
    assert alone == beside and len(alone) == 3
    assert all((runs[1] / path).read_bytes() == (runs[2] / path).read_bytes() for path in alone)
    rows = [(run / "layers.csv").read_text() for run in runs.values()]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) > 20

    for threads, run in runs.items():
        record, log = record_of(run), (run / "quantize.log").read_text()
        assert set(record["plans"]) == {"unet", "vae", "text_encoder"}
        for part, plan in record["plans"].items():
            assert (run / "plan" / f"{part}.plan").stat().st_size == plan["bytes"]
        assert len(record["fidelity"]["psnr"]["values"]) == 2
        assert (log.rindex("images ...") < log.index("plans: ")) == (threads == 2)
        assert log.index("plans: ") < log.index("latency ...") and log.index("parity: ") < log.index("latency ...")
    record = record_of(runs[2])
    assert record["seconds"] > max(stage["seconds"] for stage in record["stages"].values())
    assert list(record["stages"])[-1] == "latency"  # with nothing beside it
