"""NVIDIA's own calibrator, run outside the project, wrote percentile_golden.json; its ``source`` says how."""

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS, corrected_amax, modelopt_amax

METHODS = ("global_min", "min-max", "min-mean", "mean-max")
GOLDEN = json.loads((Path(__file__).parent / "percentile_golden.json").read_text())["cases"]

#                      step 0  1    2    3    4
AMAX = torch.tensor([[9.0, 5.0, 4.0, 8.0, 1.0], [6.0, 2.0, 7.0, 3.0, 1.0], [3.0, 5.0, 4.0, 4.0, 1.0]])
# min over prompts      3    2    4    3    1
# max                   9    5    7    8    1
# mean                  6    4    5    5    1


@pytest.mark.parametrize(
    "collect_method, percentile, expected",
    [
        ("global_min", 1.0, 1),
        ("global_min", 0.8, 2),
        ("global_min", 0.2, 3),
        ("min-max", 1.0, 1),
        ("min-max", 0.8, 5),
        ("min-max", 0.2, 9),
        ("min-mean", 1.0, 1),
        ("min-mean", 0.8, 4),
        ("min-mean", 0.2, 6),
        ("mean-max", 1.0, 6),  # (9 + 5 + 7 + 8 + 1) / 5
        ("mean-max", 0.6, 7),
        ("mean-max", 0.79, 7),  # int(5 * 0.79) = 3 steps
    ],
)
def test_corrected_gives_a_table_worked_by_hand(collect_method, percentile, expected):
    assert corrected_amax(AMAX, percentile, collect_method, 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    "collect_method, percentile, batch_size, expected",
    [
        ("min-mean", 0.8, 1, 2.4),  # 3 calls with mean 4 at step 1, summed and divided by the 5 steps
        ("min-mean", 0.8, 2, 2.0),  # calls of prompts 0 and 1, and of prompt 2: 5 + 5 at step 1, over 5 steps
        ("global_min", 0.2, 2, 3),  # calls have 9 and 3 at step 0
        ("global_min", 0.8, 2, 3),  # 9 5 7 8 and 3 5 4 4: the 2 of step 1 is hidden by its neighbour's 5
        ("global_min", 0.8, 3, 5),  # one call: 9 5 7 8
    ],
)
def test_modelopt_sees_calls_where_corrected_sees_prompts(collect_method, percentile, batch_size, expected):
    assert modelopt_amax(AMAX, percentile, collect_method, batch_size) == pytest.approx(expected)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_modelopt_gives_what_nvidias_class_gave(case):
    amax = torch.tensor(case["amax"])
    assert {method for _, _, method, _ in case["results"]} == set(METHODS)
    for batch_size, percentile, collect_method, expected in case["results"]:
        found = modelopt_amax(amax, percentile, collect_method, batch_size)
        assert found == pytest.approx(expected, rel=1e-6), (batch_size, percentile, collect_method)


def test_the_documented_calibration_of_32_prompts_on_20_steps_is_1_6_times_the_mean_in_modelopt():
    """Against NVIDIA's own numbers, so that the size of the defect is a fact and not ours twice."""
    case = next(case for case in GOLDEN if case["name"] == "documented size")
    for batch_size, percentile, collect_method, theirs in case["results"]:
        if (batch_size, collect_method) == (1, "min-mean"):
            ours = corrected_amax(torch.tensor(case["amax"]), percentile, collect_method, batch_size)
            assert theirs == pytest.approx(1.6 * ours, rel=1e-6)


@pytest.mark.parametrize("calibrator", PERCENTILE_CALIBRATORS)
@pytest.mark.parametrize("collect_method", METHODS)
def test_a_percentile_that_selects_no_step_or_more_than_there_are_is_refused(calibrator, collect_method):
    calibrate = PERCENTILE_CALIBRATORS[calibrator]
    with pytest.raises(ValueError, match=r"percentile 0.19 selects 0 of 5 steps.* from 0.2 to 1"):
        calibrate(AMAX, 0.19, collect_method, 1)
    with pytest.raises(ValueError, match=r"percentile 1.2 selects 6 of 5 steps"):
        calibrate(AMAX, 1.2, collect_method, 1)


properties = settings(derandomize=True, deadline=None)
methods = st.sampled_from(METHODS)
magnitudes = st.floats(2**-10, 2**10, width=32)


@st.composite
def tables(draw) -> torch.Tensor:
    prompts, steps = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(magnitudes, min_size=steps, max_size=steps)
    return torch.tensor(draw(st.lists(row, min_size=prompts, max_size=prompts)))


@st.composite
def calibrations(draw) -> tuple[torch.Tensor, float]:
    """A table and a percentile that selects at least one of its steps."""
    amax, percentile = draw(tables()), draw(st.floats(0.15, 1))
    assume(int(amax.shape[1] * percentile) >= 1)
    return amax, percentile


@properties
@given(calibrations(), methods, st.integers(1, 7))
def test_corrected_is_its_formula_in_plain_loops_at_every_batch_size(calibration, collect_method, batch_size):
    amax, percentile = calibration
    over_prompts = {"global_min": min, "min-max": max, "min-mean": fmean, "mean-max": max}[collect_method]
    per_step = [over_prompts(prompts) for prompts in zip(*amax.tolist(), strict=True)]
    chosen = per_step[: int(amax.shape[1] * percentile)]
    expected = fmean(chosen) if collect_method == "mean-max" else min(chosen)
    assert corrected_amax(amax, percentile, collect_method, batch_size) == pytest.approx(expected, rel=1e-6)


@properties
@given(calibrations(), methods, st.randoms(use_true_random=False))
def test_the_order_of_prompts_does_not_matter_for_corrected(calibration, collect_method, random):
    amax, percentile = calibration
    shuffled = amax[random.sample(range(len(amax)), len(amax))]
    expected = corrected_amax(amax, percentile, collect_method, 1)
    assert corrected_amax(shuffled, percentile, collect_method, 1) == pytest.approx(expected, rel=1e-6)


@properties
@given(calibrations(), methods)
def test_corrected_lies_within_the_ranges_it_saw(calibration, collect_method):
    amax, percentile = calibration
    found = corrected_amax(amax, percentile, collect_method, 1)
    assert amax.min().item() * (1 - 1e-6) <= found <= amax.max().item() * (1 + 1e-6)


@properties
@given(calibrations(), methods, st.data())
def test_the_first_steps_count_and_the_others_do_not(calibration, collect_method, data):
    amax, percentile = calibration
    step = data.draw(st.integers(0, amax.shape[1] - 1))
    selected = int(amax.shape[1] * percentile)
    silenced = amax.clone()
    silenced[:, step] = 0
    before, after = (corrected_amax(table, percentile, collect_method, 1) for table in (amax, silenced))
    if step >= selected:
        assert after == before
    elif collect_method == "mean-max":
        expected = before - amax[:, step].max().item() / selected
        assert after == pytest.approx(expected, rel=1e-6, abs=1e-6 * before)
    else:
        assert after == 0


@properties
@given(tables(), methods)
def test_percentile_1_counts_the_last_step(amax, collect_method):
    amax[:, -1] = 0
    expected = 0 if collect_method != "mean-max" else amax.amax(dim=0).mean().item()
    assert corrected_amax(amax, 1.0, collect_method, 1) == pytest.approx(expected)


@properties
@given(calibrations(), methods, st.data())
def test_a_larger_range_of_any_prompt_never_makes_corrected_smaller(calibration, collect_method, data):
    amax, percentile = calibration
    raised = amax.clone()
    raised[data.draw(st.integers(0, len(amax) - 1)), data.draw(st.integers(0, amax.shape[1] - 1))] += 100
    before, after = (corrected_amax(table, percentile, collect_method, 1) for table in (amax, raised))
    assert after >= before * (1 - 1e-6)


@properties
@given(tables(), st.sampled_from(["global_min", "min-max", "min-mean"]), st.floats(0.15, 1), st.floats(0.15, 1))
def test_more_steps_never_make_a_minimum_over_steps_larger(amax, collect_method, one, another):
    fewer, more = sorted((one, another))
    assume(int(amax.shape[1] * fewer) >= 1)
    after, before = (corrected_amax(amax, percentile, collect_method, 1) for percentile in (more, fewer))
    assert after <= before * (1 + 1e-6)  # a mean of fp32 depends on the order of its sum


@properties
@given(calibrations())
def test_the_methods_are_ordered(calibration):
    smallest, middle, larger, largest = (
        corrected_amax(*calibration, method, 1) for method in ("global_min", "min-mean", "min-max", "mean-max")
    )
    assert smallest <= middle * (1 + 1e-6) and middle <= larger * (1 + 1e-6) and larger <= largest * (1 + 1e-6)
