"""What the knobs of ``infer`` say of images, and what is refused of them before a checkpoint is opened."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from sd_quant.cli import job_of
from sd_quant.config import REPOSITORY, InferJob, QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.stages import calibrate
from sd_quant.stages.generate import check_negative_prompt, sampling_of

PROMPTS = "infer.prompts=[a cat, a dog]"
COMMON = {InferJob: ["infer=torch"], QuantizeJob: []}


def job(kind=InferJob, *overrides: str):
    name = {InferJob: "infer", QuantizeJob: "quantize"}[kind]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return job_of(kind, compose(name, [PROMPTS, *COMMON[kind], *overrides]))


def test_what_was_not_given_leaves_the_pipeline_as_it_is():
    assert sampling_of(job().infer).negative_prompts is None


@pytest.mark.parametrize(
    ("given", "negatives"), [("rain", ["rain", "rain"]), ("[rain, nude]", ["rain", "rain", "nude", "nude"])]
)
def test_negative_prompts_are_those_of_the_images(given, negatives):
    infer = job(InferJob, f"infer.negative_prompt={given}", "infer.num_samples=2").infer
    assert sampling_of(infer).negative_prompts == negatives


def test_calibration_has_the_negative_prompts_of_the_images(monkeypatch):
    """In turn, as its prompts are others."""
    taken = []
    monkeypatch.setattr(calibrate, "load_model", lambda checkpoint: None)
    monkeypatch.setattr(calibrate, "calibrate", lambda model, names, prompts, sampling, **_: taken.append(sampling))
    asked = job(QuantizeJob, "infer.negative_prompt=[rain, nude]", "infer.num_samples=2", "cache.dir=null")
    calibrate.statistics_of(SimpleNamespace(), {}, asked, "ab")
    assert taken[0].negative_prompts == ["rain", "nude"]


def test_a_family_without_an_unconditional_half_takes_no_negative_prompt():
    flux = ["model=flux", "model.path=checkpoints/sdxl_mini.nemo"]
    refused = job(InferJob, *flux, "infer.negative_prompt=rain")
    sentence = (
        "^infer.negative_prompt is rain, expected null, because the guidance of flux is an input of its network, which "
        "reads no second text$"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_negative_prompt(refused.model, refused.infer)
    for taken in (job(InferJob, *flux), job(InferJob, "infer.negative_prompt=rain")):
        check_negative_prompt(taken.model, taken.infer)
