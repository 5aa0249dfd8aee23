"""The levers beside bits: which a model can have, and what a recipe is compared with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.stages import levers
from sd_quant.stages.compare import CallsOfAnImage
from sd_quant.stages.levers import check_levers, steps_in_time
from tests.presets import job

from ..tiny import tiny  # noqa: F401  a fixture

pytestmark = pytest.mark.commit


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
    with pytest.raises(ConfigError, match="^calib_size is 1, expected at least 2, because infer.reuse chooses"):
        job("infer.reuse=0.3", "calib_size=1")
    check(tiny("sd21"), "infer.schedule=" + 20 * "c")  # saves nothing, so that nothing speaks against it


def test_a_recipe_of_bits_alone_has_no_levers():
    infer = job().infer
    assert not infer.pulls_levers
    assert levers.compared(None, SimpleNamespace(of_an_image=CallsOfAnImage(20)), None, infer, None, {}, None) is None
    assert levers.scheduled(None, None, SimpleNamespace(infer=infer, quantize=None), None) == (infer, None)
    assert replace(infer, sampler_steps=12).pulls_levers
