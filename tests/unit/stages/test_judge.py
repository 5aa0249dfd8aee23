"""What is said of a candidate, and of a run as one, of whose config nothing is executed."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sd_quant.config import Judge
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics.latency import Rounds
from sd_quant.report.record import parsed, weights_sha256
from sd_quant.stages import judge, judge_one, judged_figures, judged_run, third_party
from sd_quant.stages.judge import judge_all
from sd_quant.stages.judge_one import judged_entry
from sd_quant.stages.judged_figures import FRAMEWORK, LIBRARY, QUANTIZED, judged_runtime
from sd_quant.stages.judged_run import MOST_CALIBRATED, run_runtime, run_subject
from sd_quant.stages.third_party import OwnLibrary, Subject, SubjectPart
from tests.presets import job
from tests.refusals import refused

pytestmark = pytest.mark.commit

SDNQ = OwnLibrary("SDNQ", None)


def subject(name: str = "a.gguf", runtime: OwnLibrary | None = None, **more) -> Subject:
    denoiser = SubjectPart("gguf", "GGUF 3", 4_000_000, 4.0, more.pop("rows", []), None)
    return Subject(name, Path(name), {}, {"unet": denoiser, **more}, {}, runtime)


def baseline(**more) -> SimpleNamespace:
    session = SimpleNamespace(checkpoint=None, parameters={"unet": 8_000_000})
    usual = {"judge": SimpleNamespace(runtimes=True, layers=3), "together": True, "session": session, "prompts": [],
             "infer": None, "timing": None, "denoiser": "unet",
             "variant": lambda *_: None, "outputs": lambda: None}  # fmt: skip
    return SimpleNamespace(**usual | more)


def images(value: int) -> Generated:
    return Generated(np.full((2, 64, 64, 3), value, np.uint8), torch.zeros(2, 1))


def test_a_library_is_compared_with_our_reading_and_timed_beside_torch_or_a_reason_says_why_not(answering, monkeypatch):
    """It is other people's code: one that fails is a finding, and our reading of the candidate stands."""
    for runtime, here, reason in (
        (None, baseline(), "no library that opens it computes on this machine"),
        (SDNQ, baseline(judge=SimpleNamespace(runtimes=False)), "judge.runtimes is false"),
        (SDNQ, baseline(together=False), "memory does not hold it beside the full-precision model"),
    ):
        assert judged_runtime(subject(runtime=runtime), here, images(7), None) == {"reason": reason}
    samples = {FRAMEWORK: [20.0 + index % 3 for index in range(40)], QUANTIZED: [10.0] * 40}
    answering(judged_figures, pipeline_of=None, sampling_of=None, generate=images(8))
    answering(judged_figures, denoiser_rounds=Rounds(samples, {}, 0, "narrow", {}))
    pool = dict.fromkeys(("unet", LIBRARY), SimpleNamespace(device=torch.device("cpu")))
    found = judged_runtime(subject(runtime=SDNQ), baseline(), images(7), pool)
    assert found["ms"] == 10 and found["torch_ms"] == 21 and 1.9 < found["speedup_interval"][0] < found["speedup"] < 2.2
    assert found["agreement"]["values"] == pytest.approx([20 * np.log10(255)] * 2, abs=1e-3)  # each pixel is off by 1
    elsewhere = pool | {"unet": SimpleNamespace(device=torch.device("cuda"))}
    assert judged_runtime(subject(runtime=SDNQ), baseline(), images(7), elsewhere).keys() == {"name", "agreement"}
    monkeypatch.setattr(judged_figures, "pipeline_of", Mock(side_effect=AttributeError("a kernel\nis missing")))
    failed = judged_runtime(subject(runtime=SDNQ), baseline(), images(7), None)
    assert failed["name"] == "SDNQ" and failed["reason"].startswith("it failed with AttributeError(")
    assert "ms" not in failed and "\n" not in failed["reason"]


def test_the_layers_that_cost_most_come_first_and_other_parts_have_rows_and_an_entry_of_their_own():
    rows = [
        {"name": name, "role": "conv", "format": fmt, "inputs": "high precision", "output_error": output,
         "network_error": network, "weight_error": 0.1}
        for name, fmt, output, network in [
            ("a", "Q4_0", 0.3, None), ("b", "Q4_0", 0.1, 0.02), ("c", "Q4_0", 0.2, 0.05),
            ("d", "high precision", None, None),
        ]
    ]  # fmt: skip
    of_clip = [{"name": "clip1:layer", "format": "int8"}, {"name": "clip1:other", "format": "high precision"}]
    part = SubjectPart("diffusers_sdnq", "SDNQ", 1000, 10.0, of_clip, None, lambda: {"clip1:layer": 0.01})
    candidate = subject(rows=rows, clip1=part)
    assert judged_figures.keys_of(candidate) == {"unet": "theirs", "clip1": "theirs clip1"}
    written = judge_one.rows_with_others(rows, candidate)
    assert written == [*rows, of_clip[0] | {"weight_error": 0.01}, of_clip[1] | {"weight_error": None}]
    entry = judged_entry(candidate, baseline(), rows, 0.1, {"reason": "none"})
    assert [each["name"] for each in entry["hurting"]] == ["c", "b", "a"] and entry["bits"] == 4
    assert entry["formats"] == {"Q4_0": 3, "high precision": 1}
    assert entry["parts"] == {"clip1": {
        "reader": "diffusers_sdnq", "maker": "SDNQ", "bits": 10.0, "stored_bytes": 1000,
        "formats": {"int8": 1, "high precision": 1},
    }}  # fmt: skip


def test_a_candidate_that_fails_leaves_why_and_the_others_go_on_but_into_nobodys_folder(monkeypatch, tmp_path):
    judged = []

    def judge_one(each, here, reference, mark, folder):
        if each.name == "b":
            raise ArtifactError("b has a scale that is not finite")
        judged.append(each.name)

    monkeypatch.setattr(judge, "mark_of", lambda *_: "mark")
    monkeypatch.setattr(judge, "judge_one", judge_one)
    with pytest.raises(ArtifactError, match="not finite"):
        judge_all([subject(name) for name in "abc"], baseline(directory=tmp_path))
    assert judged == ["a", "c"]
    failure = json.loads((tmp_path / "b/failure.json").read_text())
    assert failure == {"status": "failed", "reason": "b has a scale that is not finite", "exit_code": 3}
    (tmp_path / "d").mkdir()
    (tmp_path / "d/config.yaml").touch()
    with refused(".*which holds config.yaml that no job has written"):
        judge_all([subject("d")], baseline(directory=tmp_path))
    assert (tmp_path / "d/config.yaml").exists() and judged == ["a", "c"]


@pytest.mark.parametrize("given", ["a.gguf", "a.gguf/inside.gguf", "."])
def test_a_candidate_is_never_where_its_results_are(given, tmp_path):
    """What is left of an earlier attempt is removed there."""
    (tmp_path / "a.gguf").mkdir()
    rules = SimpleNamespace(named=lambda: {"a.gguf": tmp_path / given}, trust_runs=False)
    with refused(".*and the folder of its results, .*, lie in each other; set hydra.run.dir"):
        judge.subjects_of(rules, baseline(directory=tmp_path))


@pytest.mark.parametrize(("there", "said"), [
    ("thesis.txt", "which holds thesis.txt that no job has written"),
    ("metrics.json", "which holds metrics.json that no job has written"),
    ("sweep.json", "holds a sweep of quantize; set hydra.run.dir to another folder"),
])  # fmt: skip
def test_a_folder_of_others_is_refused_before_anything_is_written(there, said, tmp_path):
    (tmp_path / there).write_text(text := '{"jobs": [{"name": "quant_level=3"}]}')
    with pytest.raises(ConfigError, match=said):
        judge.judge(None, tmp_path)
    assert (tmp_path / there).read_text() == text


def test_the_command_of_a_folder_is_what_was_given(monkeypatch):
    monkeypatch.setattr("sys.argv", ["judge.py", "candidates=[a b.gguf]"])
    plan = judge.plan_of(Judge(["a b.gguf"], 20, True, False, 0.95))
    assert plan["command"] == ["sd-quant", "judge", "candidates=[a b.gguf]"]


def test_what_decides_a_verdict_decides_whether_it_is_found_again():
    """Which others stand in the list does not; a library that was installed since does."""
    made, facts = job(), {"inputs": {"checkpoint": {"sha256": "c"}}, "versions": {"torch": "2"}}
    knobs = Judge(["a.gguf"], 20, True, False, 0.95)
    usual = {"model": made.model, "infer": made.infer, "judge": knobs, "metrics": made.metrics, "facts": facts}

    def mark(sha256: str = "f", runtime: OwnLibrary | None = None, **changes) -> str:
        candidate = replace(subject(runtime=runtime), file={"sha256": sha256})
        return judge.mark_of(candidate, baseline(**usual | changes))

    others = [mark("g"), mark(runtime=OwnLibrary("SDNQ", None)), mark(prompts=["a cat"])]
    others += [mark(judge=replace(knobs, layers=4)), mark(metrics=replace(made.metrics, ocr=True))]
    assert mark() == mark(judge=replace(knobs, candidates=["b.gguf"])) and len({mark(), *others}) == 6


@pytest.fixture
def theirs(answering):
    """The job of a stranger's run, whose record says nothing."""
    made = job("model.width=128", "infer.scale=3.0", "infer.prompts=[theirs]", "infer.seed=7")
    answering(judged_run, recipe_of_run=made, record_of_run=parsed(None))
    return made


@pytest.fixture
def runs(tmp_path):
    ours = job("infer.prompts=[ours]")
    ours.model.path = "ours.nemo"
    return SimpleNamespace(
        session="our session", directory=tmp_path, model=ours.model, infer=ours.infer, cache=None, facts={},
        judge=SimpleNamespace(trust_runs=False),
    )  # fmt: skip


def test_an_engine_is_opened_only_of_a_run_that_is_trusted(runs, tmp_path):
    assert run_runtime(tmp_path, "openvino", parsed(None), runs) is None
    trusted = SimpleNamespace(infer=runs.infer, judge=SimpleNamespace(trust_runs=True))
    assert run_runtime(tmp_path, "openvino", parsed(None), trusted).name == "openvino"
    assert run_runtime(tmp_path, "openvino", {"simulated": True}, trusted) is None
    assert run_runtime(tmp_path, "tensorrt", parsed(None), trusted) is None, "a plan is never loaded"


def test_a_run_does_not_decide_how_long_is_calibrated(theirs, runs, tmp_path):
    theirs.quantize = SimpleNamespace(calibration=None, calib_size=MOST_CALIBRATED, n_steps=2)
    with pytest.raises(ConfigError, match=r"was calibrated on 51200 prompts in 2 steps, expected at most 51200 of"):
        run_subject("a", tmp_path / "a", runs)


@pytest.mark.parametrize(("of_run", "beside"), [("with", False), ("without", True), ("other", None)])
def test_a_run_without_the_loras_gets_them_beside(theirs, runs, monkeypatch, answering, tmp_path, of_run, beside):
    """The recipe is the run's, derived without them; model and images are ours. No run of other weights is taken."""
    seen = []

    def chosen_again(job, run, step, session, directory):
        seen.append((job.model.loras, session.checkpoint))
        model, infer = job.model, job.infer
        assert (directory, job.quantize, model.path, model.width) == (tmp_path, theirs.quantize, "ours.nemo", 128)
        assert (infer.prompts, infer.seed, infer.scale) == (["ours"], runs.infer.seed, 3.0)
        return SimpleNamespace(part_presets={}), {"unet": {"a": "row"}}

    runs.session = SimpleNamespace(checkpoint="fused", denoiser="unet", parameters={"unet": 1})
    runs.facts = {"inputs": {"checkpoint": {"sha256": "without"}, "lora 1 at 1.0": {"sha256": "lora"}}}
    runs.model = replace(runs.model, loras=["a.safetensors"])
    of_run = weights_sha256(runs.facts) if of_run == "with" else of_run
    monkeypatch.setattr(judged_run, "chosen_again", chosen_again)
    monkeypatch.setattr(judged_run, "without_loras", lambda checkpoint: f"not {checkpoint}")
    monkeypatch.setattr(judged_run, "with_loras_beside", lambda *given: {"beside": given})
    monkeypatch.setattr(judged_run, "open_simulated", lambda *given: given[:2])
    answering(judged_run, record_of_run=parsed({"inputs": {"checkpoint": {"sha256": of_run}}}))
    answering(judged_run, artifact=tmp_path, onnx_bytes=1, fingerprint={}, rows_of_run=[])
    if beside is None:
        with pytest.raises(ConfigError, match="which has other weights than model.path"):
            run_subject("a", tmp_path / "a", runs)
        return
    found = run_subject("a", tmp_path / "a", runs)
    assert found.loras == ("beside" if beside else "fused")
    assert seen == [([], "not fused") if beside else (["a.safetensors"], "fused")]
    assert found.denoiser.open() == ("fused", {"beside": ("fused", "unet", {"a": "row"})} if beside else {"a": "row"})
    assert runs.infer.scale != 3.0, "ours stays as it is"
    assert found.no_runtime == (third_party.WITHOUT_LORAS if beside else judged_run.UNTRUSTED)
