"""Shifted inputs of convolutions, against torch's own asymmetric quantization."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.quantization import convolutions
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.convolutions import SHIFT_PAYS, assign_convolution, shifted_range, with_shifted_bias
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import BY_ROLE, Recipe
from sd_quant.quantization.statistics import LayerStatistics
from tests.layers import drawn, sample_of

pytestmark = pytest.mark.commit

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
    """The row of a convolution of 2x2, calibrated on ``values`` as its patches."""
    values, weight = values[: len(values) // 12 * 12].view(-1, 12)[:128], 2 * scale * drawn(8, 3, 2, 2)
    amax = values.abs().max().item() if amax is None and len(values) else amax or 0.0
    statistics = LayerStatistics("conv", torch.tensor([[amax]]), sample_of(values))
    return assign_convolution(LayerAssignment("conv", "conv", (8, 3, 2, 2)), weight, None, statistics, recipe)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_shift_halves_the_error_of_what_comes_from_silu_and_more(observer):
    """Half the step is a quarter of the squared error of rounding. What is clipped stays."""
    recipe, amax = replace(RECIPE, observer=observer), SILU.abs().max().item()
    chosen, symmetric = shifted_range(SILU, amax, recipe), observed_range(SILU, amax, "conv", recipe)
    assert -128 < chosen.zero_point < -100
    assert squared_error(SILU, chosen) < 0.5 * squared_error(SILU, InputRange(symmetric))


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
    """The calibrator's range is the bound where it is smaller."""
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
