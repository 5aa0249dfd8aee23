"""Torch's own products of codes against exact arithmetic, and a network of them against ModelOpt's simulation."""

import copy

import pytest
import torch

from sd_quant.engines import native
from sd_quant.engines.native import NativeLinear, RoundedConv, check_device, with_native_layers
from sd_quant.errors import ResourceError
from sd_quant.metrics.fidelity import relative_error
from sd_quant.models.unet import shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import Recipe, derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.levels import Enable, Pair
from sd_quant.quantization.simulate import simulate

FORMATS_OF_TORCH = ["int8", "fp8"]


def linear_of(form: str, rows: int) -> tuple[NativeLinear, torch.Tensor, torch.Tensor]:
    """The layer, an input [2, rows, 64], and what exact arithmetic on the same codes gives."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(2, rows, 64, generator=random)
    axis = 0 if form == "int8" else None
    amax = weight.abs().amax(1) if axis == 0 else weight.abs().amax().view(1)
    given = {"weight_axis": axis, "weight_amax": amax, "activation_amax": 3.0}
    layer = LayerAssignment("linear", "ffn", (48, 64), form, form, **given)
    bias = torch.randn(48, generator=random)
    made = NativeLinear(weight, bias, layer)
    codes = FORMATS[form].quantize(x, torch.tensor(layer.activation_scale)).double() * layer.activation_scale
    stored = FORMATS[form].dequantize(made.codes, *layer.weight_scales(weight)).double()
    return made, x, codes @ stored.T + bias


@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize("form", FORMATS_OF_TORCH)
def test_a_linear_multiplies_its_codes(form, rows):
    """fp32 sums of 64 products, each side's rounding below 1e-6."""
    made, x, expected = linear_of(form, rows)
    assert made.codes.dtype in (torch.int8, torch.float8_e4m3fn)
    assert relative_error(expected.float(), made(x)) < 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("form", FORMATS_OF_TORCH)
def test_it_answers_in_the_dtype_that_it_is_asked_in(form, dtype, tolerance):
    """The same codes on both sides; rounding the output, and adding the bias to it, takes 2^-11 and 2^-8 each."""
    made, x, _ = linear_of(form, 80)
    made.bias = made.bias.to(dtype)
    found, expected = made(x.to(dtype)), made(x.to(dtype).float())
    assert found.dtype == dtype
    assert relative_error(expected, found.float()) < tolerance


@pytest.mark.parametrize("form", FORMATS_OF_TORCH)
@torch.no_grad()
def test_the_network_computes_what_the_simulation_does(calibrated, form):
    """Layer by layer the same codes. Roundings that fall the other way change everything behind them, so the whole is
    compared by its distance to full precision, as the main job does."""
    pair = Pair(form, form)
    recipe = Recipe(3.0, 0.8, collect_method="min-max", enable=Enable(pair, pair, None), per_channel=form == "int8")
    part = calibrated.part()
    weights = copy.deepcopy(part.unet)
    assignment = derive(
        calibrated.roles, lambda name: weights.get_submodule(name).weight, calibrated.statistics.layers, recipe,
        shared_inputs(calibrated.roles),
    )  # fmt: skip
    replaced = with_native_layers(copy.deepcopy(part.unet), assignment)
    simulated = simulate(part.unet, assignment)
    made = {name for name, module in replaced.named_modules() if isinstance(module, NativeLinear | RoundedConv)}
    assert made == {layer.name for layer in assignment.values() if layer.format}
    seen = {}
    for name in made:
        simulated.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
        )
    inputs = calibrated.calls[0]
    expected = part(**inputs)
    for name, (x, output) in seen.items():
        assert relative_error(output, replaced.get_submodule(name)(x)) < 1e-3, name
    part.unet = replaced
    full, found = calibrated.part()(**inputs), part(**inputs)
    assert relative_error(full, found) < 1.2 * relative_error(full, expected)


def test_a_gpu_without_the_product_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native.torch.cuda, "get_device_capability", lambda: (8, 0))
    check_device({"int8"})
    with pytest.raises(ResourceError, match=r"torch multiplies fp8 on GPUs of compute capability 8\.9 or more"):
        check_device({"int8", "fp8"})
