"""Ranges of inputs as they are, scaled per token or rotated, and of weights; and of steps, by percentile.

NVIDIA's own calibrator, run outside the project, wrote percentile_golden.json; its ``source`` says how.
"""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_quant.models.parts import SharedInput
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.observers.mse import mse, squared_errors
from sd_quant.quantization.percentile import PERCENTILE_CALIBRATORS, corrected_amax, modelopt_amax
from sd_quant.quantization.ranges import observed_range
from sd_quant.quantization.recipe import ROTATIONS, Enable, Pair, Recipe
from sd_quant.quantization.rotation import rotation_matrix
from sd_quant.quantization.row_chunks import output_amax
from sd_quant.quantization.statistics import LayerStatistics
from tests.layers import drawn, sample_of, turned

pytestmark = pytest.mark.commit

WIDTH = 64
INT8, NVFP4 = Pair("int8", "int8"), Pair("nvfp4", "nvfp4")
ROLES = {"conv": "conv", "to_q": "qkv", "up": "ffn", "out": "linear"}
LINEARS = [name for name, role in ROLES.items() if role != "conv"]


WEIGHTS = {name: drawn(24, WIDTH, seed=index) for index, name in enumerate(LINEARS)} | {"conv": drawn(8, 4, 4, 4)}
ROWS = drawn(64, WIDTH, seed=1) * torch.where(torch.arange(WIDTH) == 5, 40, 1)  # an outlier channel
LINEAR = LayerStatistics("linear", 1.5 * ROWS.abs().amax(0)[None], sample_of(ROWS.half()))
STATISTICS = dict.fromkeys(LINEARS, LINEAR) | {"conv": replace(LINEAR, kind="conv", amax=torch.tensor([[30.0]]))}


def assigned(pair: Pair, alpha: float | None = None, weights=WEIGHTS, **given) -> dict[str, LayerAssignment]:
    conv = pair if pair == INT8 else Pair(pair.weight, None)
    recipe = Recipe(3.0, alpha, enable=Enable(conv, pair, None), per_channel=pair == INT8, **given)
    inputs = [SharedInput((name,)) for name in LINEARS]
    return derive(ROLES, weights.__getitem__, STATISTICS, recipe, inputs)


@pytest.mark.parametrize(
    "pair, given", [(INT8, {"per_token": True}), (INT8, {"per_token": True, "rotation": 16}), (NVFP4, {"rotation": 64})]
)
def test_linears_are_scaled_per_token_and_rotated_and_convolutions_never(pair, given):
    rows = assigned(pair, **given)
    expected = (given.get("per_token", False), given.get("rotation", 0))
    assert {(rows[name].per_token, rows[name].rotation) for name in LINEARS} == {expected}
    assert (rows["conv"].per_token, rows["conv"].rotation) == (False, 0)
    assert {(row.per_token, row.rotation) for row in assigned(pair).values()} == {(False, 0)}
    of_weights = assigned(Pair(pair.weight, None), **given)  # where inputs stay as they are, as under a budget
    assert {(row.per_token, row.rotation) for row in of_weights.values()} == {(False, 0)}


@pytest.mark.parametrize("group, alpha", [(4, None), (16, 0.5), (64, None)])
def test_ranges_of_weights_are_those_of_what_is_rotated(group, alpha):
    rows = assigned(INT8, alpha, per_token=True, rotation=group)
    for name in LINEARS:
        expected = turned(rewritten(WEIGHTS[name], rows[name]), group).abs().amax(1).float()
        torch.testing.assert_close(rows[name].weight_amax, expected)
        torch.testing.assert_close(output_amax(WEIGHTS[name], rows[name]), expected)
        assert not torch.allclose(expected, rewritten(WEIGHTS[name], rows[name]).abs().amax(1))


def test_ranges_of_rotated_inputs_are_those_of_the_sample_with_headroom():
    """Twice the largest. Without a sample a rotated number is a sum of ``group`` numbers over root(group)."""
    rows = assigned(NVFP4, rotation=64)
    expected = 2 * turned(ROWS.half(), 64).abs().max().item()
    assert rows["up"].activation_amax == pytest.approx(expected)
    assert assigned(NVFP4)["up"].activation_amax == pytest.approx(1.5 * ROWS.abs().max().item())
    recipe = Recipe(3.0, None, enable=Enable(Pair("nvfp4", None), NVFP4, None), rotation=16)
    assert observed_range(torch.empty(0, WIDTH), 3.0, "ffn", recipe) == 3.0 * 16**0.5


@pytest.mark.parametrize("group", ROTATIONS[1:])
def test_it_is_a_regular_hadamard_matrix_that_fp16_holds(group):
    """Numbers of one magnitude, orthogonal and symmetric; all rows have the sum 1, of Sylvester's the first has all.

    So a mean stays what it is, which channels behind an activation function have, and becomes no outlier.
    """
    matrix = rotation_matrix(group)
    assert (matrix.dtype, matrix.shape) == (torch.float32, (group, group))
    assert torch.equal(matrix.abs(), torch.full((group, group), 1 / math.sqrt(group)))
    assert torch.equal(matrix @ matrix, torch.eye(group)) and torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.sum(0), torch.ones(group))
    assert torch.equal(matrix.half().float(), matrix)


# Ranges of steps, by percentile

METHODS = ("global_min", "min-max", "min-mean", "mean-max")
GOLDEN = json.loads((Path(__file__).parent / "percentile_golden.json").read_text())["cases"]

#                      step 0  1    2    3    4
AMAX = torch.tensor([[9.0, 5.0, 4.0, 8.0, 1.0], [6.0, 2.0, 7.0, 3.0, 1.0], [3.0, 5.0, 4.0, 4.0, 1.0]])
# min over prompts      3    2    4    3    1
# max                   9    5    7    8    1
# mean                  6    4    5    5    1


@pytest.mark.parametrize("collect_method, table", [
    ("global_min", {1.0: 1, 0.8: 2, 0.2: 3}),
    ("min-max", {1.0: 1, 0.8: 5, 0.2: 9}),
    ("min-mean", {1.0: 1, 0.8: 4, 0.2: 6}),
    ("mean-max", {1.0: 6, 0.6: 7, 0.79: 7}),  # (9 + 5 + 7 + 8 + 1) / 5; int(5 * 0.79) = 3 steps
])  # fmt: skip
def test_corrected_gives_a_table_worked_by_hand(collect_method, table):
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


@pytest.mark.parametrize(("calibrator", "collect_method"), product(PERCENTILE_CALIBRATORS, METHODS))
def test_a_percentile_that_selects_no_step_or_more_than_there_are_is_refused(calibrator, collect_method):
    calibrate = PERCENTILE_CALIBRATORS[calibrator]
    with pytest.raises(ValueError, match=r"percentile 0.19 selects 0 of 5 steps.* from 0.2 to 1"):
        calibrate(AMAX, 0.19, collect_method, 1)
    with pytest.raises(ValueError, match=r"percentile 1.2 selects 6 of 5 steps"):
        calibrate(AMAX, 1.2, collect_method, 1)


COUNT = 30_011
each_distribution = pytest.mark.parametrize("distribution", ["gaussian", "rectified", "heavy-tailed", "one outlier"])


def draw(distribution: str) -> Tensor:
    random = np.random.default_rng(0)
    values = random.standard_t(3, size=COUNT) if distribution == "heavy-tailed" else random.normal(size=COUNT)
    if distribution == "one outlier":
        values[7] = -30
    if distribution == "rectified":
        values = values.clip(min=0)
    return torch.from_numpy(values).float()


def amax_of(values: Tensor) -> float:
    return values.abs().max().item()


def modelopt_error(values: Tensor, threshold: float) -> float:
    """Of ModelOpt's own quantizer. Its ``compute_amax("mse")`` is of no use: 0.47 passes the number of bits where the
    quantizer takes a bias, and so returns the first range it tries, a sixteenth of the peak, whatever the values."""
    from modelopt.torch.quantization.tensor_quant import fake_tensor_quant

    quantized = fake_tensor_quant(values, torch.tensor(threshold), None, 8, False, True)
    return (quantized.double() - values.double()).square().mean().item()


@each_distribution
def test_squared_errors_are_those_of_modelopts_quantizer(distribution):
    """Within its fp32: the step is rounded, and with it which level the values near a boundary go to."""
    values = draw(distribution)
    thresholds = amax_of(values) * np.array([1.0, 0.9, 0.61, 0.3, 0.1, 0.01])
    expected = [modelopt_error(values, threshold) for threshold in thresholds]
    assert squared_errors(values.abs(), thresholds).tolist() == pytest.approx(expected, rel=1e-4)


@each_distribution
def test_mse_is_as_good_as_brute_force(distribution):
    """A grid seven times as fine finds an error less than 1 % smaller: the largest of the sample rise and fall over the
    thresholds' 1 %, so the curve is not quite smooth."""
    values = draw(distribution)
    peak = amax_of(values)
    grid = peak * np.geomspace(1, 1 / 20, 2000)
    best = modelopt_error(values, grid[squared_errors(values.abs(), grid).argmin()])
    found = mse(values, peak)
    assert best < 0.98 * modelopt_error(values, peak)
    assert modelopt_error(values, found) < 1.01 * best


def test_never_more_than_amax():
    """A sample may exceed it by how its dtype was rounded. Steps of 1 and of 127 both round 127 to itself."""
    assert 0 < mse(torch.tensor([1.0, 9.004]), 9.0) <= 9.0
    assert mse(torch.tensor([127.0]), 127.0**2) == 127.0**2
    for values in ([], [[]], [0.0, -0.0], [1.0, math.nan], [1.0, -math.inf]):  # which say nothing
        assert mse(torch.tensor(values), 3.0) == 3.0, values
