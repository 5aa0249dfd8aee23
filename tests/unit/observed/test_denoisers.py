"""Several denoisers of one pipeline: each is calibrated by its own calls, and stands in the other's place."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.config.images import LEVERS
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import denoiser_part, denoisers_of, in_place
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages import load
from sd_quant.stages.calibrate import watched_layers
from tests.presets import job

pytestmark = [pytest.mark.commit, pytest.mark.slow]
TWO, SECOND = "WanPipeline, two denoisers", "transformer_2"
PROMPTS = ["a cat", "a dog", "a red bicycle"]
SAMPLING = Sampling(steps=4, guidance_scale=5.0, height=32, width=32, batch_size=1, seed=3)


def names_of(checkpoint) -> list[str]:
    return watched_layers(checkpoint, checkpoint.family.layer_roles(None))


def collected(checkpoint, names, **more) -> Statistics:
    wanted = Pass(load_model(checkpoint), names, PROMPTS, SAMPLING)
    return calibrate(wanted, fabric_for("cpu"), checkpoint_sha256="", **more)


@pytest.fixture(scope="module")
def both(observe, tmp_path_factory) -> list[Statistics]:
    """Of both denoisers in one pass, and the same again from the cache, in two segments."""
    checkpoint, cache = observe(TWO), tmp_path_factory.mktemp("statistics")
    names = names_of(checkpoint) + [f"{SECOND}:{name}" for name in names_of(in_place(checkpoint, SECOND))]
    return [collected(checkpoint, names, snapshots=[2], cache=cache) for _ in range(2)]


def test_each_is_calibrated_by_its_own_calls_in_one_pass(observe, both):
    """As it is where it alone is quantized: over the steps in which it is called, and no others."""
    steps = {}
    for statistics in both:
        found = {"transformer": statistics} | statistics.parts
        assert found.keys() == {"transformer", SECOND}
        for part, own in found.items():
            alone = observe(TWO, denoiser=part)
            expected = collected(alone, names_of(alone))
            assert own.layers.keys() == expected.layers.keys() and own.calls.keys() == expected.calls.keys()
            for name, layer in own.layers.items():
                assert torch.equal(layer.amax, expected.layers[name].amax)
                assert torch.equal(layer.rows.values, expected.layers[name].rows.values)
            assert all(torch.equal(own.calls[name].values, each.values) for name, each in expected.calls.items())
            steps[part] = own.steps
    assert sum(steps.values()) == SAMPLING.steps and min(steps.values()) >= 1
    first, second = both[0].layers["blocks.0.attn1.to_q"], both[0].parts[SECOND].layers["blocks.0.attn1.to_q"]
    assert not torch.equal(first.amax.amax(0), second.amax.amax(0))


def test_one_in_the_place_of_the_other_has_its_layers_and_weights(observe):
    checkpoint = observe(TWO)
    place = in_place(checkpoint, SECOND)
    assert denoisers_of(checkpoint) == ["transformer", SECOND] and denoisers_of(place) == [SECOND, "transformer"]
    assert in_place(checkpoint, "transformer") is checkpoint
    assert place.family.layers is checkpoint.observation.layers[SECOND] is not checkpoint.family.layers
    assert denoiser_part(place).component == denoiser_part(pickle.loads(pickle.dumps(place))).component == SECOND


def test_both_have_the_recipe_and_excluded_patterns_or_one_has_its_own(observe, monkeypatch):
    monkeypatch.setattr(load.Session, "check", lambda *_: None)
    checkpoint = observe(TWO)

    def loaded(*overrides: str):
        made = job("model=diffusers", f"model.path={checkpoint.path}", "model.width=64", "model.height=64", *overrides)
        return load.with_recipe(load.Session(checkpoint), made.model, made.infer, made.quantize)

    found = loaded("quantize.exclude.diffusers=[blocks.0.*]", "quant_level=3")
    (other,) = found.others.values()
    assert found.denoisers == ["transformer", SECOND] and found.part_presets == {SECOND: "int8"}
    assert other.denoiser == SECOND and other.recipe is found.recipe and other.exclude == found.exclude
    own = loaded(f"quantize.parts={{{SECOND}: fp8}}", "quantize.exclude.diffusers=[blocks.0.*]")
    assert own.part_presets == {SECOND: "fp8"} and own.recipe.enable.linear.weight == "int8"
    recipe = own.others[SECOND].recipe
    assert (recipe.enable.linear.weight, recipe.format, recipe.exclude) == ("fp8", "fp8", own.recipe.exclude)
    assert recipe.quant_level == own.recipe.quant_level
    for alone in (f"quantize.parts={{{SECOND}: fp16}}", "model.denoiser=transformer"):
        assert loaded(alone).denoisers == ["transformer"]


@pytest.mark.parametrize("knob", ["budget", "fit", "assignment", "calibration", *LEVERS])
def test_what_is_about_one_denoiser_is_refused_for_two(knob):
    session = SimpleNamespace(checkpoint=SimpleNamespace(family=SimpleNamespace(DENOISERS=("one", "two"))))
    knobs = SimpleNamespace(**dict.fromkeys(("budget", "fit", "assignment", "calibration", *LEVERS)))
    load.check_together(session, knobs, knobs)
    setattr(knobs, knob, 7)
    expected = rf"\.{knob} is 7, expected null, because one and two are both quantized .*; model.denoiser=one quantizes"
    with pytest.raises(ConfigError, match=expected):
        load.check_together(session, knobs, knobs)
