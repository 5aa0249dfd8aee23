"""Smoothing by hand, two or three channels wide; against ModelOpt's on a network see simulation/test_modelopt.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.parts import SharedInput
from sd_quant.quantization import convolutions
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.convolutions import SHIFT_PAYS, assign_convolution, shifted_range, with_shifted_bias
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.linears import Readers, absorb_scale, assign_linears
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import BY_ROLE, Enable, Pair, Recipe
from sd_quant.quantization.row_chunks import layer_of_rows
from sd_quant.quantization.smoothing import awake, pre_quant_scale, range_keeping_scale
from sd_quant.quantization.statistics import LayerStatistics
from tests.layers import drawn, sample_of

pytestmark = pytest.mark.commit

AMAX, COLUMNS = torch.tensor([4.0, 16.0, 1.0]), torch.tensor([1.0, 4.0, 9.0])


@pytest.mark.parametrize("alpha, expected", [
    (0.0, [1.0, 4.0, 9.0]),  # w: all difficulty stays with the input
    (0.5, [0.5, 0.5, 3.0]),  # sqrt(w / a)
    (1.0, [0.25, 0.0625, 1.0]),  # 1 / a: every input channel gets the same range
])  # fmt: skip
def test_a_table_worked_by_hand_where_dead_channels_are_left_alone(alpha, expected):
    torch.testing.assert_close(pre_quant_scale(AMAX, COLUMNS, alpha), torch.tensor(expected), rtol=1e-6, atol=0)
    dead = torch.tensor([0.0, 2.0**-31, 1.0, 1.0])
    assert pre_quant_scale(dead, torch.tensor([1.0, 1.0, 0.0, 1.0]), alpha).tolist() == [1, 1, 1, 1]


def test_no_channel_counts_as_quieter_than_three_in_four_are():
    amax = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0])
    assert awake(amax, 0.75).tolist() == [0.0, 3.0, 3.0, 3.0, 100.0]
    assert awake(amax, 0.0).tolist() == amax.tolist()


def test_a_modulations_vector_is_a_multiple_that_keeps_the_range_of_the_input():
    """With alpha 0.5 the plain one is (0.5, 0.5, 3) and what it makes of the ranges (2, 8, 3): 16 / 8 is missing."""
    scale = range_keeping_scale(AMAX, COLUMNS, 0.5)
    assert scale.tolist() == [1.0, 1.0, 6.0] and (AMAX * scale).max() == AMAX.max()
    assert range_keeping_scale(torch.zeros(2), torch.ones(2), 0.5).tolist() == [1.0, 1.0]


ATTENTION = SharedInput(("to_q",), "norm1.linear", modulation=(0, 1))
FEED_FORWARD = SharedInput(("ff",), "norm1.linear", modulation=(3, 4))
CONTINUOUS = SharedInput(("to_q",), "norm1.linear", modulation=(1, 0))
WEIGHT, BIAS = torch.arange(1.0, 37).view(12, 3), torch.arange(1.0, 13)
ROW = LayerAssignment("norm1.linear", "linear", (12, 3), reason="excluded")
SCALE, OTHER = torch.tensor([2.0, 0.5]), torch.tensor([4.0, 0.25])


def absorb(shared: SharedInput, row: LayerAssignment, scale: torch.Tensor, weight=WEIGHT, bias=BIAS):
    return absorb_scale(shared, row, lambda name: weight, lambda name: bias, scale)


def test_a_scales_bias_gets_the_factor_minus_one():
    row = absorb(ATTENTION, ROW, SCALE)
    assert row.output_scale.tolist() == [2, 0.5, 2, 0.5, *[1] * 8]
    assert row.output_shift.tolist() == [0, 0, 1, -0.5, *[0] * 8]
    assert rewritten(BIAS, row).tolist() == [2, 1, 2 * 3 + 1, 0.5 * 4 - 0.5, *range(5, 13)]
    assert torch.equal(rewritten(WEIGHT, row), WEIGHT * row.output_scale[:, None])
    assert row.reason == "excluded" and row.format is None
    assert absorb(CONTINUOUS, ROW, SCALE).output_shift.tolist() == [1, -0.5, *[0] * 10]


def test_factors_of_one_input_multiply_and_rows_have_their_part():
    """s1 s2 (1 + scale), whatever has been absorbed before."""
    twice, once = absorb(ATTENTION, absorb(ATTENTION, ROW, SCALE), OTHER), absorb(ATTENTION, ROW, SCALE * OTHER)
    assert torch.equal(rewritten(BIAS, twice), rewritten(BIAS, once))
    assert torch.equal(rewritten(BIAS[1:4], layer_of_rows(once, slice(1, 4))), rewritten(BIAS, once)[1:4])
    # without a bias, or beyond fp16, it absorbs nothing
    assert absorb(ATTENTION, ROW, SCALE, bias=None) is None
    assert absorb(ATTENTION, ROW, SCALE, bias=BIAS * 5e3) is not None
    assert absorb(ATTENTION, ROW, SCALE, bias=BIAS * 3e4) is None
    assert absorb(ATTENTION, ROW, SCALE, weight=WEIGHT * 1e4) is None


@pytest.mark.parametrize("per_token, wakes, room", [(False, True, True), (False, False, False), (True, True, False)])
def test_a_static_range_holds_channels_that_wake_after_calibration(per_token, wakes, room):
    """Equation 4 amplifies the 24 quiet channels of 32. Where they wake from fold to fold, they get room to grow."""
    generator = torch.Generator().manual_seed(0)
    amax = torch.tensor([1.0] * 24 + [8.0] * 7 + [10.0])
    rows = torch.rand(64, 32, generator=generator) * amax
    folds = torch.stack([amax, amax.clone()])
    folds[1, :24] *= 0.001 if wakes else 1.0
    statistics = LayerStatistics("linear", amax.expand(20, -1), sample_of(rows), folds)
    reader, weight = LayerAssignment("to_q", "qkv", (4, 32)), torch.randn(4, 32, generator=generator) * 8 / amax
    formats = Enable(Pair("int8", "int8"), Pair("int8", "int8"), None)
    recipe = Recipe(3.0, "auto", collect_method="min-max", enable=formats, per_token=per_token)
    row = assign_linears(
        SharedInput(("to_q",), None), {"to_q": reader}, {"to_q": weight}, lambda name: weight, lambda name: None,
        {"to_q": statistics}, recipe,
    )["to_q"]  # fmt: skip
    smoothed = amax * row.pre_quant_scale
    assert (smoothed[:24].max() < 0.75 * smoothed.max()) == room


def test_what_one_fold_of_the_prompts_has_beyond_the_range_of_the_other():
    """With alpha 1 and weights of 1 every channel of a fold gets its range: what the other has beyond it is clipped."""
    folds, empty = torch.tensor([[1.0, 8.0], [3.0, 2.0]]), sample_of(torch.empty(0, 2))
    statistics = LayerStatistics("linear", folds.amax(0)[None], empty, folds)
    readers = Readers([], {}, torch.ones(2), statistics, pre_quant_scale)
    assert readers.clipped_squares(1.0, 0.0).tolist() == [(3 - 1) ** 2 / 2, (8 - 2) ** 2 / 2]
    for alpha, quiet in ((0.0, 0.0), (1.0, 1.0)):
        assert readers.clipped_squares(alpha, quiet).tolist() == [0.0, (8 - 3) ** 2 / 2]
    one = replace(statistics, folds=torch.stack([folds[0], torch.zeros(2)]))
    assert replace(readers, statistics=one).clipped_squares(1.0, 0.0).tolist() == [0.0, 0.0]


# Shifted inputs of convolutions, against torch's own asymmetric quantization


RECIPE = Recipe(3.0, None, shift=True, observer="mse")
INT8, bias_of_shift = FORMATS["int8"], convolutions.bias_of_shift
VALUES = 2 * drawn(20000)
SILU = F.silu(VALUES)


def shifted_layer(chosen: InputRange) -> LayerAssignment:
    return LayerAssignment("conv", "conv", (4, 3, 3, 3), "int8", "int8", activation_amax=chosen.amax,
                           activation_zero_point=chosen.zero_point)  # fmt: skip


def squared_error(values: Tensor, chosen: InputRange) -> float:
    return (shifted_layer(chosen).rounded_input(values) - values).square().sum().item()


def assigned(values: Tensor, amax: float | None = None, recipe: Recipe = RECIPE, scale: float = 1) -> LayerAssignment:
    values, weight = values[: len(values) // 12 * 12].view(-1, 12)[:128], 2 * scale * drawn(8, 3, 2, 2)
    amax = values.abs().max().item() if amax is None and len(values) else amax or 0.0
    statistics = LayerStatistics("conv", torch.tensor([[amax]]), sample_of(values))
    return assign_convolution(LayerAssignment("conv", "conv", (8, 3, 2, 2)), weight, None, statistics, recipe)


@pytest.mark.parametrize(
    "values, pays",
    [(VALUES, False), (SILU, True), (SILU - 3, True), (VALUES.abs(), True)],
    ids=["both", "silu", "below", "above"],
)
def test_an_input_is_shifted_where_the_output_gains(values, pays):
    layer, plain = assigned(values), assigned(values, recipe=replace(RECIPE, shift=False))
    assert plain.activation_zero_point == 0 and plain.bias is None
    assert (layer.activation_zero_point != 0) == pays
    if pays:
        assert layer.output_error <= SHIFT_PAYS * plain.output_error
    else:
        assert layer.activation_amax == plain.activation_amax


def test_a_bias_that_fp16_rounds_by_more_than_the_shift_gains_speaks_against_it(monkeypatch):
    """As if all weights of an output had the same sign, and more; or nothing to judge by, or no output to gain."""
    assert assigned(SILU).activation_zero_point
    assert assigned(torch.empty(0), 3.0).activation_zero_point == assigned(SILU, scale=0).activation_zero_point == 0
    monkeypatch.setattr(convolutions, "bias_of_shift", lambda *given: 1000 * bias_of_shift(*given))
    assert assigned(SILU).activation_zero_point == 0


def test_by_role_looks_for_the_smallest_error_of_convolutions_and_clips_nothing_of_linears():
    recipe = replace(RECIPE, observer=BY_ROLE)
    for role, observer in (("conv", "mse"), ("ffn", "min_max"), ("linear", "min_max")):
        expected = observed_range(VALUES, 20.0, role, replace(recipe, observer=observer))
        assert observed_range(VALUES, 20.0, role, recipe) == expected
    assert observed_range(VALUES, 20.0, "conv", recipe) != observed_range(VALUES, 20.0, "ffn", recipe)


def test_fp16_holds_the_bias_of_a_shifted_input(monkeypatch):
    """Far better than with the smallest scale that clips nothing. The others are at most 0.8 % larger."""
    monkeypatch.setattr("sd_quant.quantization.row_chunks.CHUNK", 2**14)
    weight, bias = drawn(256, 64, 3, 3), drawn(256, seed=1)
    layer = LayerAssignment("conv", "conv", tuple(weight.shape))
    plain = with_ranges(layer, weight, InputRange(3.0, -115), Recipe(3.0, None))
    nudged = with_shifted_bias(plain, weight, bias)

    def errors(layer: LayerAssignment) -> Tensor:
        scale = per_channel(layer.weight_scale, weight)
        exact = bias_of_shift(INT8.quantize(weight, scale), scale, layer.shift) + bias
        return (exact.half().float() - exact).abs()

    assert errors(nudged).mean() < errors(plain).mean() / 4
    assert (nudged.bias.half().float() - nudged.bias).abs().tolist() == errors(nudged).tolist()
    ratio = nudged.weight_scale / plain.weight_scale
    assert ratio.min() >= 1 and ratio.max() < 1.008


def test_all_codes_are_used_where_nothing_is_clipped():
    chosen = shifted_range(SILU, 1.0, RECIPE)
    assert (127 - chosen.zero_point) * shifted_layer(chosen).activation_scale == pytest.approx(1.0, rel=2e-2)
    layer = shifted_layer(shifted_range(SILU, SILU.max().item(), replace(RECIPE, observer="min_max")))
    codes = ((SILU - layer.shift) / layer.activation_scale).round()
    assert (codes.min().item(), codes.max().item()) == (-128, 127)


def test_no_other_range_of_a_shifted_input_has_a_smaller_error():
    """Of values with a long tail, of which half as many levels would clip more. Those that are tried are 1 % apart."""
    values = VALUES.abs() ** 3
    chosen = shifted_range(values, values.max().item(), RECIPE)
    assert chosen.zero_point == -128
    others = [InputRange(share * chosen.amax, -128) for share in torch.linspace(0.5, 1.5, 201).tolist()]
    assert squared_error(values, chosen) < 1.01 * min(squared_error(values, other) for other in others)
