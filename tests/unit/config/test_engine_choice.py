"""What infer=auto is; only the question for the GPU is answered by the test."""

import json
from dataclasses import asdict

import pytest

from sd_quant.config import artifact, deciding, plans
from sd_quant.engines import gpu
from sd_quant.engines.tensorrt.plan import RTX_HEADER, PlanReport
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.stages import job_folder

from .composition import job

pytestmark = pytest.mark.commit

NO_GPU = "there is no NVIDIA GPU that torch can use"


@pytest.fixture
def on(monkeypatch):
    """This machine's GPU is of this compute capability, or there is none."""
    return lambda found: monkeypatch.setattr(gpu, "current_gpu", lambda: found)


@pytest.mark.parametrize(("found", "knobs", "engine", "because"), [
    (None, {}, "openvino", NO_GPU),
    ("SM89", {}, "tensorrt_rtx", "the GPU is SM89, which runs the plans that are built"),
    ("SM86", {}, "tensorrt_rtx", "the GPU is SM86, which runs the plans that are built"),
    ("SM86", {"trt.targets": ["SM89", "SM120"]}, "openvino",
     "the GPU is SM86, which runs no plan of tensorrt_rtx for SM89 and SM120"),
    ("SM86", {"trt.targets": []}, "tensorrt_rtx", "the GPU is SM86, which runs the plans that are built"),
    ("SM75", {}, "openvino", "the GPU is SM75, which runs no plan of tensorrt_rtx for SM89 and SM120"),
    ("SM90", {"trt.targets": []}, "openvino", "the GPU is SM90, which runs no plan of tensorrt_rtx in int8"),
    ("SM89", {"trt.library": "none"}, "openvino", "no plans are built"),
    ("SM89", {"quantize.quant_level": 4.0, "quantize.enable.attention": "int8"}, "openvino",
     "TensorRT takes no unsigned codes, and has a kernel for attention as it is"),
])  # fmt: skip
def test_the_engine_of_a_job_is_what_runs_its_plans_here(on, found, knobs, engine, because):
    on(found)
    chosen = job("quantize", knobs).infer
    assert (chosen.engine, chosen.chosen_because) == (engine, because)


@pytest.mark.parametrize(("found", "fmt", "chosen"), [
    ("SM90", "int8", ("tensorrt", f"the GPU is SM90, which runs the plans that are built; {gpu.TAKE_FP8}")),
    ("SM90", "fp8", ("tensorrt", "the GPU is SM90, which runs the plans that are built")),
    ("SM80", "fp8", ("openvino", "the GPU is SM80, which runs no plan of tensorrt in fp8")),
])  # fmt: skip
def test_tensorrt_builds_for_the_gpu_that_is_there(on, monkeypatch, found, fmt, chosen):
    monkeypatch.setattr(plans, "find_spec", lambda name: name)
    trt = job("quantize", {"infer.engine": "openvino"}).trt
    on(found)
    assert plans.engine_for(trt, {"weights": {fmt}, "inputs": {fmt}}) == chosen


def test_a_choice_is_the_job_that_names_its_engine_and_what_follows_from_it_is_checked(on):
    """``auto`` and the engine that it chooses are one job, so a sweep resumes with either; a named engine stays."""
    on("SM89")
    assert job("quantize", {"infer.engine": "onnxruntime"}).infer.chosen_because is None
    assert job("quantize", {"infer.cuda_graph": True}).infer.cuda_graph
    on(None)
    with pytest.raises(ConfigError, match=r"infer\.cuda_graph is True, expected false, because infer\.engine=openvino"):
        job("quantize", {"infer.cuda_graph": True})
    jobs = [job("quantize", {"infer.engine": engine}) for engine in ("auto", "openvino", "onnxruntime")]
    assert deciding(jobs[0]) == deciding(jobs[1]) != deciding(jobs[2])
    facts = {"inputs": {}, "versions": {}}
    assert len({job_folder.fingerprint_of(each, facts) for each in jobs}) == 2


def test_the_engine_of_a_run_is_what_runs_the_plans_that_it_has(on, run):
    def chosen(found: str | None, **knobs: object) -> tuple[str, str]:
        on(found)
        found_here = job("infer", {"run": run} | knobs)
        found_here.check_files()
        return found_here.infer.engine, found_here.infer.chosen_because

    assert chosen("SM89") == ("openvino", "there is no plan of unet_xl")
    for part in ("unet_xl", "vae", "clip1", "clip2"):
        plan = artifact(run, "plan", part)
        plan.parent.mkdir(exist_ok=True)
        head = RTX_HEADER.pack(b"vtrt", RTX_HEADER.size, 1, 7, 0, 0, b"vtrt", 0b1000)  # for SM89
        plan.write_bytes(head)
    assert chosen(None) == ("openvino", NO_GPU)
    assert chosen("SM89") == ("tensorrt_rtx", "the GPU is SM89, which the plans are for")
    assert chosen("SM120") == ("openvino", "the GPU is SM120, which runs no plan of tensorrt_rtx for SM89")
    given = {f"files.{path.stem}": str(path) for path in sorted((run / "plan").iterdir())}
    assert chosen(None, run=None, **given) == ("tensorrt_rtx", "only plans are given")
    (run / "plan/unet_xl.plan").write_bytes(b"no plan's header")
    report = PlanReport("a library", "1", [], {}, None, None, {}, "", 0, 0.0, 0)
    (run / "plan/unet_xl.plan.json").write_text(json.dumps(asdict(report)))
    with pytest.raises(ArtifactError, match="is said to be of a library, expected tensorrt or tensorrt_rtx"):
        chosen(None)
    onnx = {"files.vae": str(artifact(run, "onnx", "vae"))}
    assert chosen("SM89", **onnx) == ("openvino", "there is no plan of vae")
