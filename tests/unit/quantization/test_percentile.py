"""NVIDIA's own calibrator, run outside the project, wrote percentile_golden.json; its ``source`` says how."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS, corrected_amax, modelopt_amax

pytestmark = pytest.mark.commit

METHODS = ("global_min", "min-max", "min-mean", "mean-max")
GOLDEN = json.loads((Path(__file__).parent / "percentile_golden.json").read_text())["cases"]

#                      step 0  1    2    3    4
AMAX = torch.tensor([[9.0, 5.0, 4.0, 8.0, 1.0], [6.0, 2.0, 7.0, 3.0, 1.0], [3.0, 5.0, 4.0, 4.0, 1.0]])
# min over prompts      3    2    4    3    1
# max                   9    5    7    8    1
# mean                  6    4    5    5    1


@pytest.mark.parametrize(
    "collect_method, table",
    [
        ("global_min", {1.0: 1, 0.8: 2, 0.2: 3}),
        ("min-max", {1.0: 1, 0.8: 5, 0.2: 9}),
        ("min-mean", {1.0: 1, 0.8: 4, 0.2: 6}),
        ("mean-max", {1.0: 6, 0.6: 7, 0.79: 7}),  # (9 + 5 + 7 + 8 + 1) / 5; int(5 * 0.79) = 3 steps
    ],
)
def test_corrected_gives_a_table_worked_by_hand(collect_method, table):
    """Whatever the batch size."""
    for (percentile, expected), batch_size in product(table.items(), (1, 2, 7)):
        assert corrected_amax(AMAX, percentile, collect_method, batch_size) == pytest.approx(expected), percentile


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_modelopt_gives_what_nvidias_class_gave(case):
    amax = torch.tensor(case["amax"])
    for batch_size, percentile, *expected in case["results"]:
        found = [modelopt_amax(amax, percentile, method, batch_size) for method in METHODS]
        assert found == pytest.approx(expected, rel=1e-6), (batch_size, percentile)
        if batch_size == 1:  # 7 prompts on 5 steps: 1.4 times the mean
            ours = corrected_amax(amax, percentile, "min-mean", batch_size)
            assert expected[METHODS.index("min-mean")] == pytest.approx(len(amax) / len(amax[0]) * ours, rel=1e-6)


@pytest.mark.parametrize("calibrator", PERCENTILE_CALIBRATORS)
@pytest.mark.parametrize("collect_method", METHODS)
def test_a_percentile_that_selects_no_step_or_more_than_there_are_is_refused(calibrator, collect_method):
    calibrate = PERCENTILE_CALIBRATORS[calibrator]
    with pytest.raises(ValueError, match=r"percentile 0.19 selects 0 of 5 steps.* from 0.2 to 1"):
        calibrate(AMAX, 0.19, collect_method, 1)
    with pytest.raises(ValueError, match=r"percentile 1.2 selects 6 of 5 steps"):
        calibrate(AMAX, 1.2, collect_method, 1)
