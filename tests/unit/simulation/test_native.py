"""Torch's own products of codes against exact arithmetic, and a network of them against ModelOpt's simulation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sd_quant.errors import ResourceError
from sd_quant.models.unet import shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.simulation import native
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import (
    PRODUCTS,
    NativeConv,
    NativeLinear,
    RoundedConv,
    check_device,
    layer_of,
    with_native_layers,
)
from tests.layers import static_layer

FORMATS_OF_TORCH = ["int8", "fp8"]


def codes_of(x: torch.Tensor, layer: LayerAssignment) -> torch.Tensor:
    """float64, the numbers that the codes of ``x`` stand for."""
    codes = FORMATS[layer.format].quantize(x, torch.tensor(layer.activation_scale))
    return codes.double() * layer.activation_scale


def linear_of(fmt: str, rows: int, per_row: bool | None = None) -> tuple[NativeLinear, torch.Tensor, torch.Tensor]:
    """The layer, an input [2, rows, 64], and what exact arithmetic on the same codes gives."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(2, rows, 64, generator=random)
    layer = static_layer(weight, fmt, fmt == "int8" if per_row is None else per_row)
    bias = torch.randn(48, generator=random)
    made = NativeLinear(weight, bias, layer, PRODUCTS["cpu"][FORMATS[fmt].onnx_type].linear)
    stored = FORMATS[fmt].dequantize(made.codes, *layer.weight_scales(weight)).double()
    return made, x, codes_of(x, layer) @ stored.T + bias


@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize("fmt", FORMATS_OF_TORCH)
def test_a_linear_multiplies_its_codes(fmt, rows):
    """fp32 sums of 64 products, each side's rounding below 1e-6."""
    made, x, expected = linear_of(fmt, rows)
    assert made.codes.dtype in (torch.int8, torch.float8_e4m3fn)
    assert relative_error(expected.float(), made(x)) < 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_fp8_has_scales_per_row_too(dtype, tolerance):
    made, x, expected = linear_of("fp8", 80, per_row=True)
    made.bias = made.bias.to(dtype)
    assert len(made.weight_scale) == 48 and made.weight_scale.unique().numel() > 40
    exact = expected if dtype == torch.float32 else made(x.to(dtype).float()).double()
    assert relative_error(exact.float(), made(x.to(dtype)).float()) < tolerance


@pytest.mark.parametrize("stride, padding, dilation", [(1, 1, 1), (2, 1, 1), (2, 0, 1), (1, 2, 2)])
@pytest.mark.parametrize("size", [1, 3, (3, 2)])
def test_a_convolution_multiplies_its_codes(size, stride, padding, dilation):
    """Zeros around the picture are the code 0; int32 sums are exact."""
    random = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(20, 12, size, stride, padding, dilation)
    x = torch.randn(2, 20, 9, 7, generator=random)
    layer = static_layer(conv.weight.detach(), "int8", per_row=True)
    made = layer_of(conv, layer, PRODUCTS["cpu"])
    assert isinstance(made, NativeConv)
    codes = made.codes.unflatten(1, (*conv.kernel_size, 20)).movedim(-1, 1)
    stored = codes.double() * made.weight_scale.double()[:, None, None, None]
    expected = F.conv2d(codes_of(x, layer), stored, conv.bias.double(), stride, padding, dilation)
    found = made(x)
    assert found.shape == expected.shape and relative_error(expected.float(), found) < 1e-6
    assert torch.equal(made(x.to(memory_format=torch.channels_last)), found)


@pytest.mark.parametrize("given", [{"groups": 2}, {"stride": (1, 2)}, {"padding": (1, 0)}])
def test_a_convolution_that_has_no_product_is_rounded(given):
    conv = nn.Conv2d(8, 4, 3, **given)
    layer = static_layer(conv.weight.detach(), "int8", per_row=True)
    assert isinstance(layer_of(conv, layer, PRODUCTS["cpu"]), RoundedConv)


def test_on_a_processor_fp8_convolutions_are_rounded_because_a_product_is_slower():
    conv = nn.Conv2d(8, 4, 3)
    layer = static_layer(conv.weight.detach(), "fp8", per_row=False)
    assert isinstance(layer_of(conv, layer, PRODUCTS["cpu"]), RoundedConv)
    assert isinstance(layer_of(conv, layer, PRODUCTS["cuda"]), NativeConv)


@pytest.mark.parametrize("outputs, inputs, unfit", [(32, 64, False), (36, 64, True), (32, 40, True)])
def test_sizes_that_cuda_does_not_take_are_the_kernels(monkeypatch, outputs, inputs, unfit):
    taken = []
    monkeypatch.setattr(native, "scaled_mm", lambda *_: taken.append("library"))
    monkeypatch.setattr(native, "kernel_linear", lambda *_: taken.append("kernel"))
    weight = torch.randn(outputs, inputs)
    made = NativeLinear(weight, None, static_layer(weight, "fp8", False), native.aligned_scaled_mm)
    made.product(torch.zeros(4, inputs), made, torch.float16)
    assert taken == ["kernel" if unfit else "library"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("fmt", FORMATS_OF_TORCH)
def test_it_answers_in_the_dtype_that_it_is_asked_in(fmt, dtype, tolerance):
    """The same codes on both sides; rounding the output, and adding the bias to it, takes 2^-11 and 2^-8 each."""
    made, x, _ = linear_of(fmt, 80)
    made.bias = made.bias.to(dtype)
    found, expected = made(x.to(dtype)), made(x.to(dtype).float())
    assert found.dtype == dtype
    assert relative_error(expected, found.float()) < tolerance


@pytest.mark.parametrize("fmt", FORMATS_OF_TORCH)
@torch.no_grad()
def test_the_network_computes_what_the_simulation_does(calibrated, fmt):
    """Layer by layer the same codes. Roundings that fall the other way change everything behind them, so the whole is
    compared by its distance to full precision, as the main job does."""
    pair = Pair(fmt, fmt)
    recipe = Recipe(3.0, 0.8, collect_method="min-max", enable=Enable(pair, pair, None), per_channel=fmt == "int8")
    part = calibrated.part()
    weights = copy.deepcopy(part.unet)
    assignment = derive(
        calibrated.roles, lambda name: weights.get_submodule(name).weight, calibrated.statistics.layers, recipe,
        shared_inputs(calibrated.roles),
    )  # fmt: skip
    replaced = with_native_layers(copy.deepcopy(part.unet), assignment)
    simulated = simulate(part.unet, assignment)
    made = {
        name for name, module in replaced.named_modules() if isinstance(module, NativeLinear | NativeConv | RoundedConv)
    }
    assert made == {layer.name for layer in assignment.values() if layer.format}
    seen = {}
    for name in made:
        simulated.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
        )
    inputs = calibrated.calls[0]
    expected = part(**inputs)
    for name, (x, output) in seen.items():
        # 1.3e-3 was measured in fp8 with AVX2 alone: the codes of some inputs are those of the next number
        assert relative_error(output, replaced.get_submodule(name)(x)) < 2e-3, name
    part.unet = replaced
    full, found = calibrated.part()(**inputs), part(**inputs)
    assert relative_error(full, found) < 1.2 * relative_error(full, expected)


def test_a_gpu_without_the_product_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native.torch.cuda, "get_device_capability", lambda: (8, 6))
    check_device({"int8"})
    with pytest.raises(ResourceError, match=r"torch multiplies fp8 on GPUs of compute capability 8\.9 or more"):
        check_device({"int8", "fp8"})
