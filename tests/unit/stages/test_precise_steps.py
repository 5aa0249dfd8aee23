"""What ``infer.precise_steps`` lets the engines choose among, and what else the same time buys."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sd_quant.inference.pipeline import Sampling
from sd_quant.stages import precise_steps as stage
from sd_quant.stages.precise_steps import FEWER, KEPT, controls_of, multiplications, wanted_schedules
from tests.presets import job
from tests.refusals import refused

pytestmark = pytest.mark.commit

# The error with all four steps precise, and what quantizing the inputs of each adds: the last adds most.
PRODUCTS = torch.diag(torch.tensor([1.0, 1.0, 4.0, 9.0, 100.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("wanted", "step_time", "found"),
    [
        (1, None, ["ccch", "hccc"]),
        (2, 0.1, ["cchh", "hcch"]),
        (3, 0.1, ["chhh", "hhch"]),
        ("8dB", None, ["ccch", "hccc"]),  # 10 log10 of 115 / 15
        ("9dB", None, ["cchh", "hcch"]),
        ("25%", 0.1, ["cchh", "hcch"]),
        ("25%", 0.0, ["hhhh"]),
        ("auto", 0.1, ["ccch", "cchh", "hhhh"]),
        ("99dB", None, "infer.precise_steps is 99dB, expected at most the 21 dB that unquantized inputs gain in all"),
        ("5%", 0.1, "infer.precise_steps is 5%, expected at least the 0.1 of an image's denoising that one step adds"),
    ],
)
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
