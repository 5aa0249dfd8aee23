"""A run as a candidate is data: nothing that its config says is executed, and no time is its to spend."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sd_quant.config import Infer, Model
from sd_quant.errors import ConfigError
from sd_quant.report.record import weights_sha256
from sd_quant.stages import judged_run, third_party
from sd_quant.stages.judged_run import MOST_CALIBRATED, run_runtime, run_subject
from tests.presets import job
from tests.refusals import refused

pytestmark = pytest.mark.commit


@pytest.fixture
def theirs(answering):
    """The job of a stranger's run, whose record says nothing."""
    made = job("model.width=128", "infer.scale=3.0", "infer.prompts=[theirs]", "infer.seed=7")
    answering(judged_run, recipe_of_run=made, record_of_run={})
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
    assert run_runtime(tmp_path, "openvino", {}, runs) is None
    trusted = SimpleNamespace(infer=runs.infer, judge=SimpleNamespace(trust_runs=True))
    assert run_runtime(tmp_path, "openvino", {}, trusted).name == "openvino"
    assert run_runtime(tmp_path, "openvino", {"simulated": True}, trusted) is None
    assert run_runtime(tmp_path, "tensorrt", {}, trusted) is None, "a plan is never loaded"


def test_the_recipe_is_the_runs_and_model_images_and_places_are_ours(theirs, runs, monkeypatch, tmp_path):
    seen = []

    def chosen_again(job, run, step, session, directory):
        seen.append((job, session, directory))
        raise InterruptedError

    monkeypatch.setattr(judged_run, "chosen_again", chosen_again)
    with pytest.raises(InterruptedError):
        run_subject("a", tmp_path / "a", runs)
    ((used, session, directory),) = seen
    model: Model = used.model
    infer: Infer = used.infer
    assert (session, directory, used.quantize) == ("our session", tmp_path, theirs.quantize)
    assert (model.path, model.width) == ("ours.nemo", 128)
    assert (infer.prompts, infer.seed, infer.scale) == (["ours"], runs.infer.seed, 3.0)
    assert runs.infer.scale != 3.0, "and ours stays as it is"


def test_a_run_does_not_decide_how_long_is_calibrated(theirs, runs, tmp_path):
    theirs.quantize = SimpleNamespace(calibration=None, calib_size=MOST_CALIBRATED, n_steps=2)
    with pytest.raises(ConfigError, match=r"was calibrated on 51200 prompts in 2 steps, expected at most 51200 of"):
        run_subject("a", tmp_path / "a", runs)


@pytest.mark.parametrize(
    ("of_run", "beside"), [("with", False), ("without", True), ("other", None)], ids=["fused", "beside", "another"]
)
def test_a_run_of_the_model_without_its_loras_gets_them_beside_its_weights(
    theirs, runs, monkeypatch, answering, tmp_path, of_run, beside
):
    """Its recipe is derived of the checkpoint without them; a run with them is as it is, and no other is taken."""
    seen = []

    def chosen_again(job, run, step, session, directory):
        seen.append((job.model.loras, session.checkpoint))
        return SimpleNamespace(part_presets={}), {"unet": {"a": "row"}}

    runs.session = SimpleNamespace(checkpoint="fused", denoiser="unet", parameters={"unet": 1})
    runs.facts = {"inputs": {"checkpoint": {"sha256": "without"}, "lora 1 at 1.0": {"sha256": "lora"}}}
    runs.model = replace(runs.model, loras=["a.safetensors"])
    of_run = weights_sha256(runs.facts) if of_run == "with" else of_run
    monkeypatch.setattr(judged_run, "chosen_again", chosen_again)
    monkeypatch.setattr(judged_run, "without_loras", lambda checkpoint: f"not {checkpoint}")
    monkeypatch.setattr(judged_run, "with_loras_beside", lambda *given: {"beside": given})
    monkeypatch.setattr(judged_run, "open_simulated", lambda *given: given[:2])
    answering(judged_run, record_of_run={"inputs": {"checkpoint": {"sha256": of_run}}})
    answering(judged_run, artifact=tmp_path, onnx_bytes=1, fingerprint={}, rows_of_run=[])
    if beside is None:
        with pytest.raises(ConfigError, match="which has other weights than model.path"):
            run_subject("a", tmp_path / "a", runs)
        return
    found = run_subject("a", tmp_path / "a", runs)
    assert found.loras == ("beside" if beside else "fused")
    assert seen == [([], "not fused") if beside else (["a.safetensors"], "fused")]
    assert found.denoiser.open() == ("fused", {"beside": ("fused", "unet", {"a": "row"})} if beside else {"a": "row"})
    assert found.no_runtime == (third_party.WITHOUT_LORAS if beside else judged_run.UNTRUSTED)


def test_a_policy_of_precise_steps_is_the_schedule_of_the_judges_steps():
    def declared(first: int, last: int) -> SimpleNamespace:
        return SimpleNamespace(precise_ends=(first, last), path="a")

    assert third_party.schedule_of(declared(2, 1), 5) == "hhcch"
    assert third_party.schedule_of(declared(0, 3), 3) == "hhh"
    assert third_party.schedule_of(declared(0, 0), 5) is third_party.schedule_of(declared(0, 1), 1) is None
    with refused("a multiplies unquantized inputs in its first 3 and last 3 steps, which overlap in 5; set infer."):
        third_party.schedule_of(declared(3, 3), 5)
