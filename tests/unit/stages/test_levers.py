"""The levers beside bits: which a model can have, what a recipe is compared with."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sd_quant.stages import levers
from sd_quant.stages.levers import check_levers, steps_in_time
from sd_quant.stages.shared import CallsOfAnImage
from tests.presets import job
from tests.refusals import refused

from ..tiny import tiny  # noqa: F401  a fixture

pytestmark = pytest.mark.commit

HALF, INFER = 10 * "cr", job().infer


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
    ("sdxl", {"reuse": 0.3}, None),
    ("sd3", {"schedule": HALF}, None),
    ("sd21", {"schedule": 20 * "c"}, None),  # which saves nothing, so that nothing speaks against it
    ("pixart", {"reuse": 0.3}, "infer.reuse is 0.3, but under DPMSolver.*a sampler under which it is .EulerDisc"),
    ("sd21", {"schedule": HALF}, "infer.schedule is "),
])  # fmt: skip
def test_a_lever_that_the_model_cannot_have_is_refused(tiny, family, levers, sentence):  # noqa: F811
    with refused(sentence):
        check_levers(tiny(family).checkpoint, replace(INFER, **levers))


def test_a_recipe_of_bits_alone_has_no_levers():
    assert not INFER.pulls_levers
    assert levers.compared(None, SimpleNamespace(of_an_image=CallsOfAnImage(20)), INFER, {}, None) is None
    assert levers.scheduled(None, SimpleNamespace(infer=INFER)) == (INFER, {"chosen": None, "precise": None})
    assert replace(INFER, schedule=20 * "c").pulls_levers
