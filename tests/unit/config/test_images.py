"""The section ``infer``: prompts, LoRAs and precise steps, and by what steps are chosen."""

import pytest

from sd_quant.composition import readable
from sd_quant.config import lora_of, prompts_of
from sd_quant.config.precise_steps import PreciseSteps, ends_of, precise_steps
from sd_quant.errors import ConfigError
from tests.presets import infer_job
from tests.presets import job as composed_job

from .composition import TABLE, job

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(("stated", "expected"), [
    ("style.safetensors", ("style.safetensors", 1.0)),
    ("a/b.safetensors:0.8", ("a/b.safetensors", 0.8)), ("b.safetensors:-1", ("b.safetensors", -1.0)),
    ("v1:0.8.SafeTensors", ("v1:0.8.SafeTensors", 1.0)),
    ("v1:0.8.safetensors:2", ("v1:0.8.safetensors", 2.0)),
])  # fmt: skip
def test_a_lora_has_a_strength(stated, expected):
    model = job("infer", {"model.loras": [stated]}).model
    assert lora_of(model.loras[0]) == (*expected, None)
    with pytest.raises(ConfigError, match="^model.loras names .*, which does not exist"):
        model.check_files()


def test_prompts_come_from_a_list_or_a_file_or_are_drawn_from_a_data_set_with_their_categories(tmp_path):
    """One of each category first; samples of a prompt have its category."""
    listed = job("quantize", {"infer.prompts": ["a", "b"], "infer.num_samples": 2}).infer
    (tmp_path / "prompts.txt").write_text("c\nd\n")
    read = job("quantize", {"infer.prompts": tmp_path / "prompts.txt"}).infer
    assert (listed.prompt_list(), read.prompt_list()) == (["a", "a", "b", "b"], ["c", "d"])
    (tmp_path / "set.tsv").write_text(TABLE)
    knobs = {"infer.prompts": tmp_path / "set.tsv", "infer.num_prompts": 2, "infer.num_samples": 2}
    infer = job("quantize", knobs).infer
    prompts, categories = infer.prompt_list(), infer.categories()
    assert len(set(prompts)) == 2 and prompts[::2] == prompts[1::2] and "'OPEN' on a door" in prompts
    assert [prompt == "'OPEN' on a door" for prompt in prompts] == [category == "Text" for category in categories]
    whole = job("quantize", {"infer.prompts": tmp_path / "set.tsv"}).infer
    assert whole.categories() == ["Animals", "Animals", "Text"]
    drawn = {tuple(job("quantize", knobs | {"infer.prompts_seed": seed}).infer.prompt_list()) for seed in range(9)}
    assert len(drawn) > 1
    assert job("quantize", {}).infer.categories() is None


def test_negative_prompts_are_repeated_as_the_prompts_are():
    infer = job("quantize", {"infer.negative_prompt": ["rain", "nude"], "infer.num_samples": 2}).infer
    assert infer.negative_prompts(2) == ["rain", "rain", "nude", "nude"]
    assert infer.negative_prompts() == ["rain", "nude"]
    assert job("quantize", {"infer.negative_prompt": "rain"}).infer.negative_prompts(3) == ["rain"] * 3
    assert job("quantize", {}).infer.negative_prompts(2) is None


def test_calibration_takes_the_first_prompts_and_none_where_statistics_come_from_elsewhere(archive, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\nthree\n")
    knobs = {"model.path": archive, "model.calibration_prompts": tmp_path / "prompts.txt"}
    assert prompts_of(job("quantize", knobs | {"quantize.calib_size": 2}).calibration_rows()) == ["one", "two"]
    elsewhere = {"model.calibration_prompts": "no/such.txt", "quantize.calibration": tmp_path}
    job("quantize", knobs | elsewhere).check_files()
    with pytest.raises(ConfigError, match="no/such.txt"):  # by whose images steps are chosen
        job("quantize", knobs | elsewhere | {"infer.reuse": 0.25}).check_files()


@pytest.mark.parametrize(("value", "asks", "schedule"), [
    ("first1,last2", PreciseSteps(1, 2), "hccchh"), ("first6", PreciseSteps(6), "hhhhhh"),
    ("last2", PreciseSteps(last=2), "cccchh"), (4, PreciseSteps(count=4), None), ("5", PreciseSteps(count=5), None),
    ("2.5dB", PreciseSteps(gain_db=2.5), None), ("10%", PreciseSteps(percent=10.0), None),
    ("auto", PreciseSteps(), None),
])  # fmt: skip
def test_a_value_names_places_a_number_a_target_or_nothing(value, asks, schedule):
    found = precise_steps(value, 6)
    assert found == asks and found.schedule(6) == schedule
    assert found.by_time == (value in ("10%", "auto"))
    assert precise_steps(None, 6) is None


def test_a_comma_between_places_separates_no_jobs():
    (typed,) = ("infer.precise_steps=first3,last3",)
    assert [readable(typed, multirun) for multirun in (False, True)] == ['infer.precise_steps="first3,last3"'] * 2
    found = composed_job(readable(typed, False)).infer
    assert found.given_schedule == "hhh" + 14 * "c" + "hhh" and found.precise_letters == {"h"} and found.pulls_levers


def test_engines_of_a_run_take_places_alone_and_the_files_of_precise_steps():
    with pytest.raises(ConfigError, match="^infer.precise_steps is 4, expected places, because quantize.py chooses"):
        infer_job("infer.precise_steps=4")
    for letter in "hf":
        with pytest.raises(ConfigError, match=f"^infer.schedule is .*, expected no step {letter}, unless run= names"):
            infer_job(f"infer.schedule={letter}{'c' * 19}", "infer.steps=20").check_files()


def test_steps_are_chosen_by_prompts_that_calibration_does_not_see():
    for size, both in (100, 0), (126, 14):
        asked = composed_job(f"calib_size={size}")
        choosing, seen = set(prompts_of(asked.choosing_rows(16))), set(prompts_of(asked.calibration_rows()))
        assert len(choosing) == 16 and len(choosing & seen) == both


def test_published_policies_know_ends_alone():
    ends = {"hhcch": (2, 1), "ccc": (0, 0), None: (0, 0), "hhh": (3, 0), "hcrch": (1, 1), "chc": None, "hcf": None}
    assert {schedule: ends_of(schedule) for schedule in ends} == ends
