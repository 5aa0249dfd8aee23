"""The ranges of inputs, shifted ones above all, against torch's own asymmetric quantization."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment, bias_of_shift
from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.formats.int8 import per_channel
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.ranges import (
    InputRange,
    observed_range,
    squared_error,
    with_ranges,
    with_storable_bias,
)
from sd_quant.quantization.recipe import BY_ROLE, Recipe

RECIPE = Recipe(3.0, None, shift=True, observer="mse")
INT8 = FORMATS["int8"]


def drawn(count: int = 20000) -> Tensor:
    return 2 * torch.randn(count, generator=torch.Generator().manual_seed(0))


def shifted_layer(chosen: InputRange, **given) -> LayerAssignment:
    return LayerAssignment("conv", "conv", (4, 3, 3, 3), "int8", "int8", activation_amax=chosen.amax,
                           activation_zero_point=chosen.zero_point, **given)  # fmt: skip


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_shift_halves_the_error_of_what_comes_from_silu_and_more(observer):
    """Half the step is a quarter of the squared error of rounding. What is clipped stays, and entropy clips most."""
    values = F.silu(drawn())
    recipe, amax = replace(RECIPE, observer=observer), values.abs().max().item()
    chosen, symmetric = (observed_range(values, amax, "conv", replace(recipe, shift=on)) for on in (True, False))
    assert symmetric.zero_point == 0 and -128 < chosen.zero_point < -100
    most = 0.75 if observer == "entropy" else 0.5
    assert squared_error(values, chosen, INT8) < most * squared_error(values, symmetric, INT8)


def test_it_is_asymmetric_quantization_with_a_code_of_zero():
    """torch rounds a quotient that lies halfway to the even code, and ours may be an odd one once shifted."""
    values = F.silu(drawn())
    chosen = observed_range(values, values.max().item(), "conv", RECIPE)
    layer = shifted_layer(chosen)
    ours = fake_quantize(INT8, values - layer.shift, torch.tensor(chosen.amax)) + layer.shift
    scale = layer.activation_scale
    torchs = torch.fake_quantize_per_tensor_affine(values, scale, chosen.zero_point, -128, 127)
    assert ((ours - torchs).abs() > 1e-5).float().mean() < 1e-3
    assert squared_error(values, chosen, INT8) == pytest.approx((torchs - values).square().sum().item(), rel=1e-3)
    zero = INT8.quantize(torch.zeros(1) - layer.shift, torch.tensor(scale))
    assert zero.item() == chosen.zero_point and zero.item() * scale + layer.shift == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("values", [drawn(), F.silu(drawn()) - 3, drawn().abs()], ids=["both", "below", "above"])
def test_values_of_any_sign_are_shifted_where_it_pays(values):
    amax = values.abs().max().item()
    chosen = observed_range(values, amax, "conv", RECIPE)
    symmetric = InputRange(OBSERVERS["mse"](values, amax))
    assert -128 <= chosen.zero_point <= 127
    if values.min() < -1 and values.max() > 1 and abs(values.mean()) < 0.1:
        assert chosen == symmetric
    else:
        assert squared_error(values, chosen, INT8) < 0.9 * squared_error(values, symmetric, INT8)


def test_what_is_not_shifted():
    values = F.silu(drawn())
    amax = values.max().item()
    assert observed_range(values, amax, "conv", replace(RECIPE, shift=False)).zero_point == 0
    assert observed_range(values, amax, "ffn", RECIPE).zero_point == 0
    assert observed_range(torch.empty(0), 3.0, "conv", RECIPE) == InputRange(3.0)
    assert observed_range(torch.zeros(9), 0.0, "conv", RECIPE) == InputRange(0.0)
    assert observed_range(1e9 * values, 1e9 * amax, "conv", RECIPE).zero_point == 0  # no scale in fp16 holds it


def test_by_role_looks_for_the_smallest_error_of_convolutions_and_clips_nothing_of_linears():
    values, recipe = drawn(), replace(RECIPE, observer=BY_ROLE, shift=False)
    for role, observer in (("conv", "mse"), ("ffn", "min_max"), ("linear", "min_max")):
        expected = observed_range(values, 20.0, role, replace(recipe, observer=observer))
        assert observed_range(values, 20.0, role, recipe) == expected
    assert observed_range(values, 20.0, "conv", recipe) != observed_range(values, 20.0, "ffn", recipe)


def test_the_calibrators_range_bounds_that_of_a_shifted_input():
    values = F.silu(drawn())
    chosen = observed_range(values, 1.0, "conv", RECIPE)
    scale = shifted_layer(chosen).activation_scale
    assert (127 - chosen.zero_point) * scale == pytest.approx(1.0, rel=2e-2)


def test_fp16_holds_the_bias_of_a_shifted_input():
    """Far better than with the smallest scale that clips nothing. The others are at most 0.8 % larger."""
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(256, 64, 3, 3, generator=random), torch.randn(256, generator=random)
    layer = LayerAssignment("conv", "conv", tuple(weight.shape))
    plain = with_ranges(layer, weight, InputRange(3.0, -115), Recipe(3.0, None))
    nudged = with_storable_bias(plain, weight, bias)

    def errors(layer: LayerAssignment) -> Tensor:
        scale = per_channel(layer.weight_scale, weight)
        exact = bias_of_shift(INT8.quantize(weight, scale), scale, layer.shift) + bias
        return (exact.half().float() - exact).abs()

    assert errors(nudged).mean() < errors(plain).mean() / 4
    ratio = nudged.weight_scale / plain.weight_scale
    assert ratio.min() >= 1 and ratio.max() < 1.008


def test_the_bias_of_a_shift_is_what_the_convolution_makes_of_it():
    codes, scale = torch.randint(-127, 128, (4, 3, 3, 3), dtype=torch.int8), torch.rand(4, 1, 1, 1) / 100
    constant = torch.full((1, 3, 8, 8), 1.75)
    expected = F.conv2d(constant, codes * scale)[0, :, 0, 0]
    torch.testing.assert_close(bias_of_shift(codes, scale, 1.75), expected, rtol=1e-5, atol=1e-5)


def test_all_codes_are_used_where_nothing_is_clipped():
    values = F.silu(drawn())
    layer = shifted_layer(observed_range(values, values.max().item(), "conv", replace(RECIPE, observer="min_max")))
    codes = ((values - layer.shift) / layer.activation_scale).round()
    assert (codes.min().item(), codes.max().item()) == (-128, 127)


def test_no_other_range_of_a_shifted_input_has_a_smaller_error():
    """Of values with a long tail, of which half as many levels would clip more. Those that are tried are 1 % apart."""
    values = drawn().abs() ** 3
    chosen = observed_range(values, values.max().item(), "conv", RECIPE)
    assert chosen.zero_point == -128
    others = [InputRange(share * chosen.amax, -128) for share in torch.linspace(0.5, 1.5, 201).tolist()]
    assert squared_error(values, chosen, INT8) < 1.01 * min(squared_error(values, other, INT8) for other in others)
