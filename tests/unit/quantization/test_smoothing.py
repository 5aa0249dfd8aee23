"""Against a table worked by hand; against ModelOpt's on a network see test_against_modelopt.py."""

import pytest
import torch

from sd_quant.models.parts import SharedInput
from sd_quant.quantization.smoothing import SMOOTHINGS, awake, pre_quant_scale, range_keeping_scale

pytestmark = pytest.mark.commit

ACTIVATION, WEIGHT = torch.tensor([4.0, 16.0, 1.0]), torch.tensor([1.0, 4.0, 9.0])


@pytest.mark.parametrize(
    "alpha, expected",
    [
        (0.0, [1.0, 4.0, 9.0]),  # w: all difficulty stays with the input
        (0.5, [0.5, 0.5, 3.0]),  # sqrt(w / a)
        (1.0, [0.25, 0.0625, 1.0]),  # 1 / a: every input channel gets the same range
    ],
)
def test_a_table_worked_by_hand(alpha, expected):
    torch.testing.assert_close(pre_quant_scale(ACTIVATION, WEIGHT, alpha), torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_dead_channels_are_left_alone(alpha):
    dead = torch.tensor([0.0, 2.0**-31, 1.0, 1.0])
    assert pre_quant_scale(dead, torch.tensor([1.0, 1.0, 0.0, 1.0]), alpha).tolist() == [1, 1, 1, 1]


def test_no_channel_counts_as_quieter_than_three_in_four_are():
    amax = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0])
    assert awake(amax, 0.75).tolist() == [0.0, 3.0, 3.0, 3.0, 100.0]
    assert awake(amax, 0.0).tolist() == amax.tolist()


def test_a_modulations_vector_is_a_multiple_that_keeps_the_range_of_the_input():
    """With alpha 0.5 the plain one is (0.5, 0.5, 3) and what it makes of the ranges (2, 8, 3): 16 / 8 is missing."""
    scale = range_keeping_scale(ACTIVATION, WEIGHT, 0.5)
    assert scale.tolist() == [1.0, 1.0, 6.0] and (ACTIVATION * scale).max() == ACTIVATION.max()
    assert range_keeping_scale(torch.zeros(2), torch.ones(2), 0.5).tolist() == [1.0, 1.0]


def test_folded_keeps_the_readers_of_an_input_together_and_modelopt_takes_every_layer_alone():
    """What no module absorbs is not modulated either."""
    inputs = [SharedInput(("to_q", "to_k"), "norm1.linear", modulation=(0, 1)), SharedInput(("proj_out",), "norm")]
    assert SMOOTHINGS["folded"](inputs) == inputs
    assert SMOOTHINGS["modelopt"](inputs) == [SharedInput((name,)) for name in ("to_q", "to_k", "proj_out")]
