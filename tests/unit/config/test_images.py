"""The section ``infer``: prompts, LoRAs, precise steps and by what they are chosen, and what infer=auto is.

Only the question for the GPU is answered by the tests.
"""

import json
from dataclasses import asdict

import pytest

from sd_quant.composition import readable
from sd_quant.config import artifact, deciding, lora_of, plans, prompts_of
from sd_quant.config.precise_steps import PreciseSteps, precise_steps
from sd_quant.engines import gpu
from sd_quant.engines.tensorrt.plan import RTX_HEADER, PlanReport
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.stages import job_folder
from tests.presets import infer_job
from tests.presets import job as composed_job

from .composition import TABLE, job

pytestmark = pytest.mark.commit

NO_GPU = "there is no NVIDIA GPU that torch can use"


@pytest.mark.parametrize(("stated", "expected"), [
    ("style.safetensors", ("style.safetensors", 1.0)),
    ("a/b.safetensors:0.8", ("a/b.safetensors", 0.8)), ("b.safetensors:-1", ("b.safetensors", -1.0)),
    ("v1:0.8.SafeTensors", ("v1:0.8.SafeTensors", 1.0)),
    ("v1:0.8.safetensors:2", ("v1:0.8.safetensors", 2.0)),
])  # fmt: skip
def test_a_lora_has_a_strength(stated, expected):
    model = job("infer", {"model.loras": [stated]}).model
    assert lora_of(model.loras[0]) == (*expected, None)
    with pytest.raises(ConfigError, match="^model.loras names .*, which does not exist"):
        model.check_files()


def test_prompts_come_from_a_list_or_a_file_or_are_drawn_from_a_data_set(tmp_path):
    listed = job("quantize", {"infer.prompts": ["a", "b"], "infer.num_samples": 2}).infer
    (tmp_path / "prompts.txt").write_text("c\nd\n")
    read = job("quantize", {"infer.prompts": tmp_path / "prompts.txt"}).infer
    assert (listed.prompt_list(), read.prompt_list()) == (["a", "a", "b", "b"], ["c", "d"])
    (tmp_path / "set.tsv").write_text(TABLE)
    knobs = {"infer.prompts": tmp_path / "set.tsv", "infer.num_prompts": 2, "infer.num_samples": 2}
    infer = job("quantize", knobs).infer
    prompts = infer.prompt_list()
    assert len(set(prompts)) == 2 and prompts[::2] == prompts[1::2]
    whole = job("quantize", {"infer.prompts": tmp_path / "set.tsv"}).infer
    assert whole.prompt_list() == ["a cat", "a dog", "'OPEN' on a door"]
    drawn = {tuple(job("quantize", knobs | {"infer.prompts_seed": seed}).infer.prompt_list()) for seed in range(9)}
    assert len(drawn) > 1


def test_negative_prompts_are_repeated_as_the_prompts_are():
    infer = job("quantize", {"infer.negative_prompt": ["rain", "nude"], "infer.num_samples": 2}).infer
    assert (infer.negative_prompts(2), infer.negative_prompts()) == (["rain", "rain", "nude", "nude"], ["rain", "nude"])
    assert job("quantize", {"infer.negative_prompt": "rain"}).infer.negative_prompts(3) == ["rain"] * 3
    assert job("quantize", {}).infer.negative_prompts(2) is None


def test_calibration_takes_the_first_prompts_and_none_where_statistics_come_from_elsewhere(archive, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\nthree\n")
    knobs = {"model.path": archive, "model.calibration_prompts": tmp_path / "prompts.txt"}
    assert prompts_of(job("quantize", knobs | {"quantize.calib_size": 2}).calibration_rows()) == ["one", "two"]
    elsewhere = {"model.calibration_prompts": "no/such.txt", "quantize.calibration": tmp_path}
    job("quantize", knobs | elsewhere).check_files()
    with pytest.raises(ConfigError, match="no/such.txt"):  # by whose images steps are chosen
        job("quantize", knobs | elsewhere | {"infer.reuse": 0.25}).check_files()


@pytest.mark.parametrize(("value", "asks", "schedule"), [
    ("first1,last2", PreciseSteps(1, 2), "hccchh"), ("first6", PreciseSteps(6), "hhhhhh"),
    ("last2", PreciseSteps(last=2), "cccchh"), (4, PreciseSteps(count=4), None), ("5", PreciseSteps(count=5), None),
])  # fmt: skip
def test_a_value_names_places_a_number_or_nothing(value, asks, schedule):
    found = precise_steps(value, 6)
    assert found == asks and found.schedule(6) == schedule
    assert precise_steps(None, 6) is None


def test_a_comma_between_places_separates_no_jobs():
    (typed,) = ("infer.precise_steps=first3,last3",)
    assert [readable(typed, multirun) for multirun in (False, True)] == ['infer.precise_steps="first3,last3"'] * 2
    found = composed_job(readable(typed, False)).infer
    assert found.given_schedule == "hhh" + 14 * "c" + "hhh" and found.precise_letters == {"h"} and found.pulls_levers


def test_engines_of_a_run_take_places_alone_and_the_files_of_precise_steps():
    with pytest.raises(ConfigError, match="^infer.precise_steps is 4, expected places, because quantize.py chooses"):
        infer_job("infer.precise_steps=4")
    for letter in "hf":
        with pytest.raises(ConfigError, match=f"^infer.schedule is .*, expected no step {letter}, unless run= names"):
            infer_job(f"infer.schedule={letter}{'c' * 19}", "infer.steps=20").check_files()


def test_steps_are_chosen_by_prompts_that_calibration_does_not_see():
    for size, both in (100, 0), (126, 14):
        asked = composed_job(f"calib_size={size}")
        choosing, seen = set(prompts_of(asked.choosing_rows(16))), set(prompts_of(asked.calibration_rows()))
        assert len(choosing) == 16 and len(choosing & seen) == both


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
