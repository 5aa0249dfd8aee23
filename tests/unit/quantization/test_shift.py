"""Shifted inputs of convolutions, against torch's own asymmetric quantization."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.convolutions import SHIFT_PAYS, assign_convolution
from sd_quant.quantization.error_model import output_errors
from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.formats.int8 import per_channel
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import BY_ROLE, Recipe
from sd_quant.quantization.shift import bias_of_shift, shifted_range, with_bias
from sd_quant.quantization.statistics import LayerStatistics, Sample

RECIPE = Recipe(3.0, None, shift=True, observer="mse")
INT8 = FORMATS["int8"]


def drawn(count: int = 20000) -> Tensor:
    return 2 * torch.randn(count, generator=torch.Generator().manual_seed(0))


def shifted_layer(chosen: InputRange, **given) -> LayerAssignment:
    return LayerAssignment("conv", "conv", (4, 3, 3, 3), "int8", "int8", activation_amax=chosen.amax,
                           activation_zero_point=chosen.zero_point, **given)  # fmt: skip


def squared_error(values: Tensor, chosen: InputRange) -> float:
    layer = shifted_layer(chosen)
    rounded = fake_quantize(INT8, values - layer.shift, torch.tensor(chosen.amax)) + layer.shift
    return (rounded - values).square().sum().item()


def assigned(values: Tensor, amax: float | None = None, recipe: Recipe = RECIPE, scale: float = 1) -> LayerAssignment:
    """The row of a convolution of 2x2, calibrated on ``values`` as its patches."""
    values, weight = values[: len(values) // 12 * 12].view(-1, 12)[:128], scale * drawn(8 * 12).view(8, 3, 2, 2)
    amax = values.abs().max().item() if amax is None and len(values) else amax or 0.0
    statistics = LayerStatistics("conv", torch.tensor([[amax]]), Sample(values, torch.arange(len(values)).double()))
    return assign_convolution(LayerAssignment("conv", "conv", (8, 3, 2, 2)), weight, None, statistics, recipe)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_shift_halves_the_error_of_what_comes_from_silu_and_more(observer):
    """Half the step is a quarter of the squared error of rounding. What is clipped stays, and entropy clips most."""
    values = F.silu(drawn())
    recipe, amax = replace(RECIPE, observer=observer), values.abs().max().item()
    chosen, symmetric = shifted_range(values, amax, recipe), observed_range(values, amax, "conv", recipe)
    assert -128 < chosen.zero_point < -100
    most = 0.75 if observer == "entropy" else 0.5
    assert squared_error(values, chosen) < most * squared_error(values, InputRange(symmetric))


def test_it_is_asymmetric_quantization_with_a_code_of_zero():
    """torch rounds a quotient that lies halfway to the even code, and ours may be an odd one once shifted."""
    values = F.silu(drawn())
    chosen = shifted_range(values, values.max().item(), RECIPE)
    layer = shifted_layer(chosen)
    ours = fake_quantize(INT8, values - layer.shift, torch.tensor(chosen.amax)) + layer.shift
    scale = layer.activation_scale
    torchs = torch.fake_quantize_per_tensor_affine(values, scale, chosen.zero_point, -128, 127)
    assert ((ours - torchs).abs() > 1e-5).float().mean() < 1e-3
    assert squared_error(values, chosen) == pytest.approx((torchs - values).square().sum().item(), rel=1e-3)
    zero = INT8.quantize(torch.zeros(1) - layer.shift, torch.tensor(scale))
    assert zero.item() == chosen.zero_point and zero.item() * scale + layer.shift == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "values, pays",
    [(drawn(), False), (F.silu(drawn()), True), (F.silu(drawn()) - 3, True), (drawn().abs(), True)],
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


def test_what_is_not_shifted():
    values = F.silu(drawn())
    assert assigned(values, recipe=replace(RECIPE, shift=False)).activation_zero_point == 0
    assert assigned(torch.empty(0), 3.0).activation_zero_point == 0  # nothing to judge by
    assert assigned(values, scale=0).activation_zero_point == 0  # no output that could gain


def test_a_bias_that_fp16_rounds_by_more_than_the_shift_gains_speaks_against_it(monkeypatch):
    """As if all weights of an output had the same sign, and more."""
    values = F.silu(drawn())
    assert assigned(values).activation_zero_point
    honest = bias_of_shift
    monkeypatch.setattr("sd_quant.quantization.shift.bias_of_shift", lambda *given: 1000 * honest(*given))
    assert assigned(values).activation_zero_point == 0


def test_what_fp16_rounds_off_the_bias_counts_as_error():
    weight, patches = drawn(8 * 12).view(8, 12), drawn(1200).view(100, 12)
    layer = shifted_layer(InputRange(12.0, -20), weight_axis=0, weight_amax=weight.abs().amax(1))
    exact, rounded = (torch.full((8,), bias) for bias in (1024.0, 1024.25))  # fp16 has every whole number there
    without, alike, error = (
        output_errors(replace(layer, bias=bias), weight, patches, 1)[0] for bias in (None, exact, rounded)
    )
    assert without == alike < error


def test_by_role_looks_for_the_smallest_error_of_convolutions_and_clips_nothing_of_linears():
    values, recipe = drawn(), replace(RECIPE, observer=BY_ROLE)
    for role, observer in (("conv", "mse"), ("ffn", "min_max"), ("linear", "min_max")):
        expected = observed_range(values, 20.0, role, replace(recipe, observer=observer))
        assert observed_range(values, 20.0, role, recipe) == expected
    assert observed_range(values, 20.0, "conv", recipe) != observed_range(values, 20.0, "ffn", recipe)


def test_the_calibrators_range_bounds_that_of_a_shifted_input():
    values = F.silu(drawn())
    chosen = shifted_range(values, 1.0, RECIPE)
    scale = shifted_layer(chosen).activation_scale
    assert (127 - chosen.zero_point) * scale == pytest.approx(1.0, rel=2e-2)


def test_fp16_holds_the_bias_of_a_shifted_input():
    """Far better than with the smallest scale that clips nothing. The others are at most 0.8 % larger."""
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(256, 64, 3, 3, generator=random), torch.randn(256, generator=random)
    layer = LayerAssignment("conv", "conv", tuple(weight.shape))
    plain = with_ranges(layer, weight, InputRange(3.0, -115), Recipe(3.0, None))
    nudged = with_bias(plain, weight, bias)

    def errors(layer: LayerAssignment) -> Tensor:
        scale = per_channel(layer.weight_scale, weight)
        exact = bias_of_shift(INT8.quantize(weight, scale), scale, layer.shift) + bias
        return (exact.half().float() - exact).abs()

    assert errors(nudged).mean() < errors(plain).mean() / 4
    assert (nudged.bias.half().float() - nudged.bias).abs().tolist() == errors(nudged).tolist()
    ratio = nudged.weight_scale / plain.weight_scale
    assert ratio.min() >= 1 and ratio.max() < 1.008


def test_the_bias_of_a_shift_is_what_the_convolution_makes_of_it():
    codes, scale = torch.randint(-127, 128, (4, 3, 3, 3), dtype=torch.int8), torch.rand(4, 1, 1, 1) / 100
    constant = torch.full((1, 3, 8, 8), 1.75)
    expected = F.conv2d(constant, codes * scale)[0, :, 0, 0]
    torch.testing.assert_close(bias_of_shift(codes, scale, 1.75), expected, rtol=1e-5, atol=1e-5)


def test_all_codes_are_used_where_nothing_is_clipped():
    values = F.silu(drawn())
    layer = shifted_layer(shifted_range(values, values.max().item(), replace(RECIPE, observer="min_max")))
    codes = ((values - layer.shift) / layer.activation_scale).round()
    assert (codes.min().item(), codes.max().item()) == (-128, 127)


def test_no_other_range_of_a_shifted_input_has_a_smaller_error():
    """Of values with a long tail, of which half as many levels would clip more. Those that are tried are 1 % apart."""
    values = drawn().abs() ** 3
    chosen = shifted_range(values, values.max().item(), RECIPE)
    assert chosen.zero_point == -128
    others = [InputRange(share * chosen.amax, -128) for share in torch.linspace(0.5, 1.5, 201).tolist()]
    assert squared_error(values, chosen) < 1.01 * min(squared_error(values, other) for other in others)
