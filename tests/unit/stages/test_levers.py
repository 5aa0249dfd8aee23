"""The levers beside bits, on a sampler whose network is a function."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.inference.calls import Calls
from sd_quant.inference.pipeline import Sampling
from sd_quant.stages import levers
from sd_quant.stages.compare import CallsOfAnImage
from sd_quant.stages.levers import check_levers, choose_schedule, steps_in_time, typical_error
from tests.presets import job

from ..tiny import tiny  # noqa: F401  a fixture

STEPS = 10
SAMPLING = Sampling(steps=STEPS, guidance_scale=1, height=64, width=64, batch_size=2, seed=0)
CHECKPOINT = SimpleNamespace(family=SimpleNamespace(DENOISER="unet"))
# The velocity changes at two steps alone; elsewhere an output that is used again costs nothing.
JUMPS = (3, 7)


class Toy:
    """A pipeline of Euler steps. The text encoder is asked once a batch, the denoiser once a step."""

    calls = 0

    def __init__(self, engines):
        self.engines = engines

    def __call__(self, prompts, sampling, *, numbers, decode):
        latents = [self.image(batch, sampling) for batch in sampling.batches(list(numbers))]
        return SimpleNamespace(latents=torch.cat(latents))

    def image(self, numbers, sampling):
        text = self.engines["clip"](number=torch.tensor(numbers, dtype=torch.float))["z"]
        done, x = [], torch.zeros(len(numbers), 1, 1)
        calls = Calls(sampling.schedule, lambda: len(done), lambda step: True, ())
        for step in range(sampling.steps):
            at = torch.tensor(step * STEPS / sampling.steps)
            output = calls(lambda inputs: self.engines["unet"](**inputs), {"at": at, "text": text})["out"]
            x = x + output / sampling.steps
            done.append(x)
        return torch.stack(done, dim=1)


def engines():
    def unet(at, text):
        Toy.calls += 1
        return {"out": (1 + sum((at >= jump).float() for jump in JUMPS) + 0.01 * text)[:, None, None]}

    return {"clip": lambda number: {"z": number}, "unet": unet}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(levers, "pipeline_of", lambda checkpoint, variant: Toy(variant))
    Toy.calls = 0


def test_steps_are_replaced_where_it_costs_nothing(toy):
    """The chosen schedule has no error, the evenly spread one and fewer steps have some."""
    found = choose_schedule(CHECKPOINT, engines(), ["a"] * 8, SAMPLING, saved=3, extrapolated=False)
    assert found["schedule"].count("r") == 3 and all(found["schedule"][jump] == "c" for jump in JUMPS)
    assert "rr" not in found["schedule"] and found["schedule"][0] == found["schedule"][-1] == "c"
    assert found["error"] < 1e-6 < found["fewer_error"] and found["prompts"] == 4


def test_what_is_known_is_not_computed_again(toy):
    """Of four prompts in two batches: a whole run, for each step the calls behind it, and the runs that compare."""
    choose_schedule(CHECKPOINT, engines(), ["a"] * 8, SAMPLING, saved=1, extrapolated=False)
    alone = 2 * sum(STEPS - 1 - step for step in range(1, STEPS - 1))
    compared = Toy.calls - 2 * STEPS - alone
    assert compared <= 2 * (2 * (STEPS - 1) + STEPS + 3 * (STEPS - 1))


def test_lines_are_drawn_where_inputs_are_not_quantized(toy):
    """A velocity that rises steadily has no error on a line, and has one where it is held."""

    def unet(at, text):
        return {"out": (at + 0.01 * text)[:, None, None]}

    rising = engines() | {"unet": unet}
    drawn = choose_schedule(CHECKPOINT, rising, ["a"] * 4, SAMPLING, saved=3, extrapolated=True)
    held = choose_schedule(CHECKPOINT, rising, ["a"] * 4, SAMPLING, saved=3, extrapolated=False)
    assert drawn["schedule"].count("e") == 3 and "e" not in held["schedule"]
    assert drawn["error"] < 1e-5 < held["error"]


def test_an_image_of_another_composition_does_not_decide_the_error():
    reference = torch.ones(4, 2)
    assert typical_error(reference, reference * torch.tensor([[1.1], [1.1], [1.1], [3.0]])) == pytest.approx(
        (0.1**3 * 2) ** 0.25, rel=1e-4
    )
    assert typical_error(reference, reference) < 1e-9


@pytest.mark.parametrize(("speedup", "rest", "steps"), [(2.0, 0.0, 10), (2.0, 0.5, 5), (1.9, 0.0, 11), (1.0, 0.3, 20)])
def test_the_control_takes_no_less_time(speedup, rest, steps):
    image = {"speedup": speedup, "full_precision": {"rest": rest}}
    assert steps_in_time(image, 0.7, 20) == steps
    assert (steps + 20 * rest) / (20 + 20 * rest) >= 1 / speedup - 1e-9
    untimed = {"speedup": {"value": None, "reason": "?"}, "full_precision": {"p50_ms": None}}
    assert steps_in_time(untimed, 0.7, 20) == 14


def test_half_calls_count_by_their_time():
    assert CallsOfAnImage(10, 4).share(0.75, 20) == pytest.approx(13 / 20)


def check(opened, *knobs):
    check_levers(opened.checkpoint, job(*knobs).infer)


def test_a_lever_that_the_model_cannot_have_is_refused(tiny):  # noqa: F811
    check(tiny("sdxl"), "infer.reuse=0.3", "infer.guidance_until=1", "infer.sampler=ddim")
    check(tiny("sd3"), "infer.schedule=" + 10 * "cr", "infer.guidance_until=0.3")
    check(tiny("pixart"), "infer.reuse=0.3", "infer.sampler=euler")
    with pytest.raises(
        ConfigError, match="^infer.reuse is 0.3, but under DPMSolver.* to one .*euler, euler_karras, ddim"
    ):
        check(tiny("pixart"), "infer.reuse=0.3")
    with pytest.raises(ConfigError, match="^infer.schedule is .* predicts v_prediction.*none for this model"):
        check(tiny("sd21"), "infer.schedule=" + 10 * "cr", "infer.sampler=euler")
    with pytest.raises(ConfigError, match="^infer.sampler is heun, which a model of FlowMatch"):
        check(tiny("sd3"), "infer.sampler=heun")
    with pytest.raises(
        ConfigError, match="^infer.guidance_until is 1, expected null: this pipeline computes no guided"
    ):
        check(tiny("flux"), "infer.guidance_until=1", "infer.scale=3.5")
    for beyond in (100, 0.001):
        with pytest.raises(
            ConfigError, match=f"^infer.guidance_until is {beyond}, expected a noise level of the 20 steps"
        ):
            check(tiny("sdxl"), f"infer.guidance_until={beyond}")
    check(tiny("sd21"), "infer.schedule=" + 20 * "c")  # saves nothing, so that nothing speaks against it


def test_a_recipe_of_bits_alone_has_no_levers():
    infer = job().infer
    assert not infer.pulls_levers
    assert levers.compared(None, SimpleNamespace(of_an_image=CallsOfAnImage(20)), None, infer, None, {}, None) is None
    assert levers.scheduled(None, {}, SimpleNamespace(infer=infer), None) == (infer, None)
    assert replace(infer, sampler_steps=12).pulls_levers
