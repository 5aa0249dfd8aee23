"""The levers beside bits: which a model can have, what a recipe is compared with, and how precise steps are chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sd_quant.inference.pipeline import Sampling
from sd_quant.stages import levers
from sd_quant.stages import precise_steps as stage
from sd_quant.stages.levers import check_levers, steps_in_time
from sd_quant.stages.precise_steps import FEWER, KEPT, controls_of, multiplications, wanted_schedules
from sd_quant.stages.shared import CallsOfAnImage
from tests.presets import job
from tests.refusals import refused

from ..tiny import tiny  # noqa: F401  a fixture

pytestmark = pytest.mark.commit

HALF, INFER = 10 * "cr", job().infer
# The error with all four steps precise, and what quantizing the inputs of each adds: the last adds most.
PRODUCTS = torch.diag(torch.tensor([1.0, 1.0, 4.0, 9.0, 100.0], dtype=torch.float64))


@pytest.mark.parametrize(("speedup", "rest", "steps"), [(2.0, 0.0, 10), (2.0, 0.5, 5), (1.9, 0.0, 11), (1.0, 0.3, 20)])
def test_the_control_takes_no_less_time(speedup, rest, steps):
    image = {"speedup": speedup, "full_precision": {"rest": rest}}
    assert steps_in_time(image, 0.7, 20) == steps
    assert (steps + 20 * rest) / (20 + 20 * rest) >= 1 / speedup - 1e-9
    untimed = {"speedup": {"value": None, "reason": "?"}, "full_precision": {"p50_ms": None}}
    assert steps_in_time(untimed, 0.7, 20) == 14


def test_precise_calls_count_by_their_time():
    assert CallsOfAnImage(20, in_a_step=2.0).share({}, 10) == 1
    precise = CallsOfAnImage(20, precise={"h": 4, "f": 1})
    assert precise.share({"h": 1.5, "f": 2.0}, 20) == pytest.approx(23 / 20)


@pytest.mark.parametrize(("family", "levers", "sentence"), [
    ("sdxl", {"reuse": 0.3, "sampler": "ddim"}, None),
    ("sd3", {"schedule": HALF}, None),
    ("pixart", {"reuse": 0.3, "sampler": "euler"}, None),
    ("sd21", {"schedule": 20 * "c"}, None),  # which saves nothing, so that nothing speaks against it
    ("pixart", {"reuse": 0.3}, "infer.reuse is 0.3, but under DPMSolver.* to one .*euler, euler_karras, ddim"),
    ("sd21", {"schedule": HALF, "sampler": "euler"}, "infer.schedule is .* predicts v_prediction.*none for this model"),
    ("sd3", {"sampler": "heun"}, "infer.sampler is heun, which a model of FlowMatch"),
])  # fmt: skip
def test_a_lever_that_the_model_cannot_have_is_refused(tiny, family, levers, sentence):  # noqa: F811
    with refused(sentence):
        check_levers(tiny(family).checkpoint, replace(INFER, **levers))


def test_a_recipe_of_bits_alone_has_no_levers():
    assert not INFER.pulls_levers
    assert levers.compared(None, SimpleNamespace(of_an_image=CallsOfAnImage(20)), INFER, {}, None) is None
    assert levers.scheduled(None, SimpleNamespace(infer=INFER), None) == (INFER, {"chosen": None, "precise": None})
    assert replace(INFER, sampler_steps=12).pulls_levers


@pytest.mark.parametrize(("wanted", "step_time", "found"), [
    (1, None, ["ccch", "hccc"]), (2, 0.1, ["cchh", "hcch"]), (3, 0.1, ["chhh", "hhch"]),
    ("8dB", None, ["ccch", "hccc"]),  # 10 log10 of 115 / 15
    ("9dB", None, ["cchh", "hcch"]), ("25%", 0.1, ["cchh", "hcch"]), ("25%", 0.0, ["hhhh"]),
    ("auto", 0.1, ["ccch", "cchh", "hhhh"]),
    ("99dB", None, "infer.precise_steps is 99dB, expected at most the 21 dB that unquantized inputs gain in all"),
    ("5%", 0.1, "infer.precise_steps is 5%, expected at least the 0.1 of an image's denoising that one step adds"),
])  # fmt: skip
def test_a_wish_is_a_few_schedules(wanted, step_time, found):
    infer = replace(job("infer.steps=4").infer, precise_steps=wanted)
    with refused(found if isinstance(found, str) else None):
        assert wanted_schedules(infer, PRODUCTS, step_time) == found


def test_multiplications_are_those_of_a_call():
    network = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3, padding=1), "linear": nn.Linear(4, 5)})

    def call():
        network["linear"](network["conv"](torch.zeros(2, 3, 6, 7)).movedim(1, -1))

    counts = multiplications(network, ["linear", "conv"], call)
    assert counts == {"linear": 2 * 6 * 7 * 4 * 5, "conv": 2 * 6 * 7 * 4 * 27} and list(counts)[0] == "linear"
    assert not network["conv"]._forward_hooks


def test_the_controls_take_the_time_that_they_are_given(answering, monkeypatch):
    """A call of full precision costs two here, so a tenth more time is a tenth of the multiplications."""
    made = []
    answering(stage, measure_sensitivity=SimpleNamespace(network_error=dict.fromkeys("abcd", 1.0)), denoiser_of=None)
    monkeypatch.setattr(stage, "multiplications", lambda network, layers, call: {"a": 5, "b": 20, "c": 25, "d": 50})
    monkeypatch.setattr(stage, "Switched", lambda network, run, layers: SimpleNamespace(output=made.append))
    monkeypatch.setattr(stage, "final_latents", lambda *given: made.append(given[-1].steps))
    loaded = SimpleNamespace(checkpoint=None, denoiser="unet", guidance_scale=5.0)
    variants = SimpleNamespace(
        loaded=loaded, engines={"full_precision": {}}, assignment={}, together=True, shared=None,
        simulation=lambda part: SimpleNamespace(module=None),
    )  # fmt: skip
    calls, sampling = SimpleNamespace(calls={}), Sampling(20, 5.0, 64, 64, 1, 0, schedule="ignored")
    found = controls_of(variants, ["a"], sampling, 2.0, calls)
    for share in (0.04, 0.3, 0.6):
        found[KEPT](share)([0])
        found[FEWER](share)([0])
    assert made == [["a", "b", "c", "d"], 10, ["c", "d"], 13, ["d"], 16]
    assert found[KEPT](1.0) is found[FEWER](1.0) is None, "full precision itself takes no more"
    variants.together = False
    assert controls_of(variants, ["a"], sampling, 2.0, calls).keys() == {FEWER}
