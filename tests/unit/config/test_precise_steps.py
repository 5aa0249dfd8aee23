"""What ``infer.precise_steps`` and ``infer.schedule`` ask for, and which of it is refused."""

import pytest

from sd_quant.composition import readable
from sd_quant.config import prompts_of
from sd_quant.config.precise_steps import PreciseSteps, ends_of, precise_steps
from sd_quant.errors import ConfigError
from tests.presets import infer_job, job
from tests.refusals import refused

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("value", "asks", "schedule"),
    [
        ("first1,last2", PreciseSteps(1, 2), "hccchh"),
        ("first6", PreciseSteps(6), "hhhhhh"),
        ("last2", PreciseSteps(last=2), "cccchh"),
        (4, PreciseSteps(count=4), None),
        ("5", PreciseSteps(count=5), None),
        ("2.5dB", PreciseSteps(gain_db=2.5), None),
        ("10%", PreciseSteps(percent=10.0), None),
        ("auto", PreciseSteps(), None),
    ],
)
def test_a_value_names_places_a_number_a_target_or_nothing(value, asks, schedule):
    found = precise_steps(value, 6)
    assert found == asks and found.schedule(6) == schedule
    assert found.by_time == (value in ("10%", "auto"))
    assert precise_steps(None, 6) is None


FORM = "expected auto, places such as first3,last3"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["infer.precise_steps=first12,last12", "infer.steps=20"],
         "infer.precise_steps is first12,last12, expected at most the 20 steps of an image, and these are 24"),
        (["infer.precise_steps=20", "infer.steps=20"], "infer.precise_steps is 20, expected fewer than the 20 steps"),
        *(([f"infer.precise_steps={value}"], f"infer.precise_steps is {value}, {FORM}")
          for value in (0, "first0", "first3last3", "0dB", "0.0%", "last", "none")),
        (["infer.precise_steps=2", "infer.schedule=chhc", "infer.steps=4"], "infer.precise_steps is 2, expected null"),
        (["infer.precise_steps=2", "infer.reuse=0.3"], "infer.precise_steps is 2, expected null, because infer.reuse"),
        (["infer.schedule=chh", "infer.steps=4"], "infer.schedule is chh, expected one for each of the 4 steps"),
        (["infer.schedule=cxhh", "infer.steps=4"], "infer.schedule is cxhh, expected letters c, h, f, r and e"),
        (["infer.schedule=her", "infer.steps=3"], "infer.schedule is her, expected two computed steps before"),
        (["quantize=int8_weight_only", "infer.precise_steps=2"],
         "infer.precise_steps is 2, expected no step h, because quantize=int8_weight_only quantizes no inputs"),
        (["quantize=q4_k_weight_only", "infer.schedule=chhc", "infer.steps=4"],
         "infer.schedule is chhc, expected no step h, because quantize=q4_k_weight_only"),
        (["quantize=nvfp4", "infer=openvino", "infer.precise_steps=auto"],
         "infer.precise_steps is auto, expected places, a number of steps, or dB.*nothing is timed"),
        (["quantize=nvfp4", "infer=openvino", "infer.precise_steps=5%"], "infer.precise_steps is 5%, expected places"),
        (["infer.precise_steps=2", "calib_size=1"], "calib_size is 1, expected at least 2, because infer.pre"),
        (["infer.reuse=0.3", "calib_size=1"], "calib_size is 1, expected at least 2, because infer.reuse chooses"),
        (["quantize=nvfp4", "infer=openvino", "infer.precise_steps=3dB"], None),
        (["quantize=int8_weight_only", "infer.schedule=cffc", "infer.steps=4"], None),
        (["infer.schedule=hfcr", "infer.steps=4"], None),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(overrides, sentence):
    with refused(sentence):
        job(*(readable(each, multirun=False) for each in overrides))


def test_a_comma_between_places_separates_no_jobs():
    (typed,) = ("infer.precise_steps=first3,last3",)
    assert [readable(typed, multirun) for multirun in (False, True)] == ['infer.precise_steps="first3,last3"'] * 2
    found = job(readable(typed, False)).infer
    assert found.given_schedule == "hhh" + 14 * "c" + "hhh" and found.precise_letters == {"h"} and found.pulls_levers


def test_engines_of_a_run_take_places_alone_and_the_files_of_precise_steps():
    with pytest.raises(ConfigError, match="^infer.precise_steps is 4, expected places, because quantize.py chooses"):
        infer_job("infer.precise_steps=4")
    for letter in "hf":
        with pytest.raises(ConfigError, match=f"^infer.schedule is .*, expected no step {letter}, unless run= names"):
            infer_job(f"infer.schedule={letter}{'c' * 19}", "infer.steps=20").check_files()


def test_steps_are_chosen_by_prompts_that_calibration_does_not_see():
    for size, both in (100, 0), (126, 14):
        asked = job(f"calib_size={size}")
        choosing, seen = set(prompts_of(asked.choosing_rows(16))), set(prompts_of(asked.calibration_rows()))
        assert len(choosing) == 16 and len(choosing & seen) == both


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("hhcch", (2, 1)),
        ("ccc", (0, 0)),
        (None, (0, 0)),
        ("hhh", (3, 0)),
        ("chc", None),
        ("hcf", None),
        ("hcrch", (1, 1)),
    ],
)
def test_published_policies_know_ends_alone(schedule, ends):
    assert ends_of(schedule) == ends
