"""Torch's own products of codes against exact arithmetic, and a network of them against ModelOpt's simulation."""

import copy
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rounding import with_refined_branch, with_rounded_weight
from sd_quant.simulation import native
from sd_quant.simulation.modelopt import between_roundings, simulate
from sd_quant.simulation.native import (
    PRODUCTS,
    NativeConv,
    NativeLinear,
    PerTokenLinear,
    RoundedConv,
    check_device,
    int_mm,
    layer_of,
    with_native_layers,
)
from sd_quant.simulation.sensitivity import Switched, guided, layers_to_keep, sensitivity_rows
from tests.layers import drawn, static_layer, statistics_of, turned

pytestmark = pytest.mark.commit

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of rounding the output, and the bias


def codes_of(x: torch.Tensor, layer: LayerAssignment) -> torch.Tensor:
    codes = FORMATS[layer.format].quantize(x, torch.tensor(layer.activation_scale))
    return codes.double() * layer.activation_scale


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize(
    "place, fmt, per_row",  # a GPU's product of FP8 is torch's, which processors have too
    [("cpu", "int8", True), ("cpu", "fp8", True), ("cuda", "fp8", False), ("cuda", "fp8", True)],
)
def test_a_linear_multiplies_its_codes_and_answers_in_the_dtype_that_it_is_asked_in(place, fmt, per_row, rows, dtype):
    """fp32 sums of 64 products, each side's rounding below 1e-6; in 16 bits against the same codes' fp32 answer."""
    weight, x, bias = drawn(48, 64), drawn(2, rows, 64, seed=1), drawn(48, seed=2)
    layer = static_layer(weight, fmt, per_row)
    made = NativeLinear(weight, bias, layer, PRODUCTS[place][FORMATS[fmt].onnx_type].linear)
    assert made.weight_scale.unique().numel() > 40 or not per_row
    stored = FORMATS[fmt].dequantize(made.codes, *layer.weight_scales(weight)).double()
    expected = (codes_of(x, layer) @ stored.T + bias).float()
    if dtype != torch.float32:
        made.bias = bias.to(dtype)
        expected = made(x.to(dtype).float())
    found = made(x.to(dtype))
    assert found.dtype == dtype and relative_error(expected, found.float()) < TOLERANCES[dtype]


def test_where_the_product_of_codes_saturates_it_is_not_used(monkeypatch):
    """As on processors without VNNI, where torch gives 8160 for 64 * 127 * 127; compiled without a break, too."""
    monkeypatch.setattr(native, "int_mm_saturates", lambda: True)
    weight, largest = torch.full((48, 64), 0.5), torch.full((3, 64), 127, dtype=torch.int8)
    layer = NativeLinear(weight, None, static_layer(weight, "int8", True), int_mm)
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: torch.full((len(x), y.shape[1]), 8160))
    expected = 64 * 127 * 127 * layer.scale.expand(3, -1)
    torch.testing.assert_close(int_mm(largest, layer, torch.float32), expected)
    x = drawn(3, 64)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    monkeypatch.undo()
    native.int_mm_saturates.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: torch.full((len(x), y.shape[1]), 8160))
    assert native.int_mm_saturates()
    native.int_mm_saturates.cache_clear()


@pytest.mark.parametrize("fmt, place, given, kind", [
    *(("int8", "cpu", given, RoundedConv) for given in ({"groups": 2}, {"stride": (1, 2)}, {"padding": (1, 0)})),
    ("fp8", "cpu", {}, RoundedConv),  # a product is slower there
    ("int8", "cuda", {}, RoundedConv),
    ("fp8", "cuda", {}, NativeConv),
])  # fmt: skip
def test_a_convolution_that_has_no_product_is_rounded(fmt, place, given, kind):
    conv = nn.Conv2d(8, 4, 3, **given)
    layer = static_layer(conv.weight.detach(), fmt, per_row=fmt == "int8")
    assert isinstance(layer_of(conv, layer, PRODUCTS[place]), kind)


@pytest.mark.parametrize("outputs, inputs", [(32, 64), (36, 64), (32, 40), (36, 20)])
def test_sizes_that_cuda_does_not_take_are_the_kernels_in_fp8_and_filled_up_in_int8(outputs, inputs, monkeypatch):
    for name in ("kernel_linear", "scaled_mm"):
        monkeypatch.setattr(native, name, lambda *_, name=name: name)
    layer = SimpleNamespace(codes=torch.zeros(outputs, inputs))
    computed = native.aligned_scaled_mm(torch.zeros(4, inputs), layer, torch.float16)
    assert computed == ("scaled_mm" if (outputs, inputs) == (32, 64) else "kernel_linear")

    def multiplied(x: Tensor, y: Tensor) -> Tensor:
        assert len(x) > 16 and x.shape[1] % 8 == y.shape[1] % 8 == 0
        return (x.double() @ y.double()).int()

    monkeypatch.setattr(torch, "_int_mm", multiplied)
    weight, x = drawn(outputs, inputs), drawn(3, inputs, seed=1)
    made = NativeLinear(weight, None, static_layer(weight, "int8", True), int_mm)
    made.saturates = False
    torch.testing.assert_close(made(x), native.dequantized_mm(made.quantized(x), made, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@torch.no_grad()
def test_the_network_computes_what_the_simulation_does(calibrated, fmt):
    """Layer by layer the same codes. Roundings that fall the other way change everything behind them, so the whole is
    compared by its distance to full precision, as the main job does."""
    assignment, part = calibrated.in_format(fmt), calibrated.part()
    full = part(**calibrated.calls[0])
    replaced = with_native_layers(copy.deepcopy(part.unet), assignment)
    simulated = simulate(part.unet, assignment)
    kinds = NativeLinear | NativeConv | RoundedConv
    made = {name for name, module in replaced.named_modules() if isinstance(module, kinds)}
    assert made == {layer.name for layer in assignment.values() if layer.format}
    seen = {}
    for name in made:
        simulated.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
        )
    expected = part(**calibrated.calls[0])
    for name, (x, output) in seen.items():
        # 1.3e-3 was measured in fp8 with AVX2 alone: the codes of some inputs are those of the next number
        assert relative_error(output, replaced.get_submodule(name)(x)) < 2e-3, name
    assert relative_error(full, calibrated.output(replaced)) < 1.2 * relative_error(full, expected)


@pytest.mark.parametrize("fmt", [name for name, fmt in FORMATS.items() if fmt.onnx_type])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_weight_alone_is_codes_in_memory_and_its_numbers_in_the_product(fmt, kind):
    """Against the simulation's own rounding, to the last bit; in memory it takes its bits and its scales."""
    width = max(64, FORMATS[fmt].block or 0)
    module = nn.Linear(width, 48) if kind == "linear" else nn.Conv2d(width, 48, 3, stride=2, padding=1)
    weight, x = module.weight.detach(), drawn(2, 64, width) if kind == "linear" else drawn(2, width, 8, 8)
    row = replace(static_layer(weight, fmt, True), activation_format=None, activation_amax=None)
    row = replace(row, pre_quant_scale=drawn(width).abs().half().float()) if kind == "linear" else row
    made = layer_of(module, row, {})
    rounded = row.rounded_weight(weight.flatten(1)).view(weight.shape)
    assert torch.equal(made.dequantized(), rounded)
    if kind == "linear":  # whose codes are those of rotated weights, which are rotated back
        turned = replace(row, rotation=16)
        assert torch.equal(layer_of(module, turned, {}).dequantized(), turned.rounded_weight(weight))
    module.weight.data = rounded
    torch.testing.assert_close(made(x), module(x * row.pre_quant_scale if kind == "linear" else x))
    stored = sum(buffer.nbytes for name, buffer in made.named_buffers() if name != "pre_quant_scale")
    block = FORMATS[fmt].block
    scales = 2 * 48 if block is None else weight.numel() // block * (1 if fmt == "nvfp4" else 2) + 4 * (fmt == "nvfp4")
    assert stored == weight.numel() * FORMATS[fmt].bits // 8 + scales


def test_a_gpu_that_multiplies_no_such_codes_is_refused(monkeypatch):
    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native.torch.cuda, "get_device_capability", lambda: (8, 6))
    check_device({"int8"})
    with pytest.raises(ResourceError, match=r"torch multiplies fp8 on GPUs of compute capability 8\.9 or more"):
        check_device({"int8", "fp8"})


# Inputs that are scaled per token or rotated, simulated and multiplied by torch, against a formula of its own


OUTPUTS, INPUTS, TOKENS = 48, 128, 80


def tokens() -> Tensor:
    x = drawn(2, TOKENS, INPUTS, seed=1) * 2.0 ** torch.linspace(-6, 6, TOKENS)[:, None]
    x[..., 7] *= 20
    return x


def module(has_bias: bool) -> nn.Module:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=has_bias)
    linear.weight.data = drawn(OUTPUTS, INPUTS)
    if has_bias:
        linear.bias.data = 3 * drawn(OUTPUTS, seed=2)
    return nn.ModuleDict({"layer": linear}).requires_grad_(False)


def row_of(fmt: str, smoothed: bool = False, rank: int = 0, **given) -> LayerAssignment:
    pair, weight = Pair(fmt, fmt), drawn(OUTPUTS, INPUTS)
    recipe = Recipe(3.0, None, enable=Enable(pair, pair, None), per_channel=fmt == "int8", **given)
    row = LayerAssignment("layer", "ffn", (OUTPUTS, INPUTS))
    if smoothed:
        row = replace(row, pre_quant_scale=(drawn(INPUTS, seed=3) / 2).exp().half().float())
    if rank:
        row = replace(row, low_rank=low_rank(rewritten(weight, row), rank))
    row = with_ranges(row, weight, InputRange(1.0 if recipe.per_token else 100.0), recipe)
    if given.get("rounding") == "gptq":
        statistics = statistics_of(tokens().flatten(0, 1))
        row = with_refined_branch(row, weight, statistics, recipe)
        row = with_rounded_weight(row, weight, statistics, recipe)
    return row


def expected(row: LayerAssignment, network: nn.Module, x: Tensor) -> Tensor:
    """Codes of rotated tokens over their largest by codes of the rotated weight, times the largest, and the bias."""
    weight, bias = network["layer"].weight.double(), network["layer"].bias
    smoothed = x.double()
    if row.pre_quant_scale is not None:
        weight, smoothed = weight / row.pre_quant_scale.double(), smoothed * row.pre_quant_scale.double()
    branch = torch.zeros(())
    if row.low_rank is not None:
        up, down = (part.double() for part in row.low_rank)
        weight, branch = weight - up @ down, smoothed @ down.T @ up.T
    rotated_x, rotated_weight = turned(smoothed, row.rotation), turned(weight, row.rotation)
    largest = rotated_x.abs().amax(-1, keepdim=True) if row.per_token else torch.ones(())
    fmt, numbers = FORMATS[row.format], (rotated_x / largest).float()
    scales = fmt.scales(numbers, torch.tensor(row.activation_amax))
    codes = fmt.dequantize(fmt.quantize(numbers, *scales), *scales).double()
    if row.rounded:
        stored, *its_scales = row.rounded
    else:
        amax = row.weight_amax[:, None] if row.weight_axis == 0 else row.weight_amax
        its_scales = fmt.scales(rotated_weight.float(), amax)
        stored = fmt.quantize(rotated_weight.float(), *its_scales)
    product = codes @ fmt.dequantize(stored, *its_scales).double().T * largest
    return product + branch + (0 if bias is None else bias.double())


CASES = [  # format, whether there are factors of smoothing, whether there is a bias, and what else is given
    ("int8", True, True, {"per_token": True}),
    ("int8", False, False, {"per_token": True, "rotation": 16}),
    ("int8", True, False, {"per_token": True, "rotation": 64, "rank": 4}),
    ("fp8", False, True, {"per_token": True}),
    ("fp8", True, False, {"per_token": True, "rotation": 4}),
    ("int4", True, False, {"rank": 4}),
    ("int4", False, False, {"rotation": 64}),
    ("int4", True, True, {"rotation": 64, "rank": 4, "rounding": "gptq", "branch_rounds": 3}),
    ("mxfp4", True, False, {"rotation": 16}),
    ("nvfp4", False, True, {"rotation": 16, "rank": 4}),
]


@pytest.mark.parametrize("fmt, smoothed, has_bias, given", CASES)
def test_the_simulation_is_a_formula_in_double_precision_and_torchs_own_products(fmt, smoothed, has_bias, given):
    """But for numbers so near to halfway between two codes that fp32 and double precision decide differently.

    Each token by itself, so that the small ones count. Without rotation, or scales per token, it is off by more.
    Torch's own products, of scales per token, are also off by the order of sums, and in fp16 by what that rounds.
    """
    row, network, x = row_of(fmt, smoothed, **given), module(has_bias), tokens()
    wanted = expected(row, network, x)
    simulated = simulate(copy.deepcopy(network), {"layer": row})["layer"](x)
    found = simulated.double()
    bias = 0 if not has_bias else network["layer"].bias.double()
    errors = (found - wanted).norm(dim=-1) / (wanted - bias).norm(dim=-1)
    assert errors.max() < 2e-2 and errors.median() < 1e-4
    exact = network["layer"](x).double()
    assert 3e-3 < ((wanted - exact).norm(dim=-1) / (exact - bias).norm(dim=-1)).median() < 0.3  # rounded, not broken
    if row.per_token and row.low_rank is None:
        native = with_native_layers(copy.deepcopy(network), {"layer": row})["layer"]
        assert isinstance(native, PerTokenLinear) and native.linear.bias is None
        errors = (native(x) - simulated).norm(dim=-1) / (simulated - bias).norm(dim=-1)
        assert errors.max() < 2e-2 and errors.median() < 1e-5
        assert torch.equal(native(torch.zeros(1, 3, INPUTS))[0, 0], torch.zeros(OUTPUTS) + bias)
        half = with_native_layers(copy.deepcopy(network).half(), {"layer": row})["layer"](x.half())
        assert half.dtype == torch.float16 and relative_error(simulated, half.float()) < 1e-2


@pytest.mark.parametrize(
    "fmt, given", [("int8", {"per_token": True}), ("int8", {"per_token": True, "rotation": 16}), ("int4", {})]
)
def test_inputs_halfway_to_what_their_codes_stand_for_have_the_same_codes(fmt, given):
    row, x = row_of(fmt, True, **given), tokens()
    layer = simulate(module(True), {"layer": row})["layer"]
    moved = between_roundings(layer, x)
    assert relative_error(x, moved) > 1e-3
    assert relative_error(layer.input_quantizer(x), layer.input_quantizer(moved)) < 2e-3
    assert relative_error(layer(x), layer(moved)) < 2e-3


# Measured on a network small enough to quantize by hand, with torch's own fake quantization


NAMES = ["0", "2", "4"]
RANGES = {"0": 4.0, "2": 0.5, "4": 8.0}  # of the layers' inputs; that of "2" is much too narrow
SMOOTHING = torch.tensor([0.5, 1.0, 2.0, 4.0])  # of the input of "4"; powers of two, which fp16 holds
X = drawn(256, 4, seed=1)


torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3)).requires_grad_(False)


def assigned(name: str) -> LayerAssignment:
    weight, smoothing = NETWORK.get_submodule(name).weight, SMOOTHING if name == "4" else None
    layer = LayerAssignment(name, "ffn", tuple(weight.shape), pre_quant_scale=smoothing)
    return with_ranges(layer, weight, InputRange(RANGES[name]), Recipe(3.0, 0.8))


ASSIGNMENT = {name: assigned(name) for name in NAMES}


def by_hand(quantized: Collection[str]) -> Tensor:
    x = X
    for name, layer in ASSIGNMENT.items():
        linear = NETWORK.get_submodule(name)
        weight = linear.weight
        if layer.pre_quant_scale is not None:
            x, weight = x * SMOOTHING, weight / SMOOTHING
        if name in quantized:
            zeros = torch.zeros(len(weight), dtype=torch.int32)
            x = torch.fake_quantize_per_tensor_affine(x, layer.activation_scale, 0, -128, 127)
            weight = torch.fake_quantize_per_channel_affine(weight, layer.weight_scale, zeros, 0, -128, 127)
        x = F.linear(x, weight, linear.bias)
        x = x if name == NAMES[-1] else F.gelu(x)
    return x


def error_by_hand(quantized: Collection[str]) -> float:
    return relative_error(NETWORK(X), by_hand(quantized))


def test_the_error_of_a_layer_is_that_of_the_network_with_it_alone_quantized():
    simulated = simulate(copy.deepcopy(NETWORK), ASSIGNMENT)
    switched = Switched(simulated, lambda: simulated(X), NAMES)
    for quantized in (["0"], ["2"], ["4"], ["0", "4"], []):
        assert switched.error(quantized) == pytest.approx(error_by_hand(quantized), rel=1e-3)
    torch.testing.assert_close(simulated(X), by_hand(NAMES))


def test_the_table_has_the_most_sensitive_layer_first():
    table = sensitivity_rows({"2": 0.5, "0": 0.4, "4": 0.3}, ASSIGNMENT, kept=2)
    found = [(row["name"], row["network_error"], row["rank"], row["kept"]) for row in table]
    assert found == [("2", 0.5, 1, True), ("0", 0.4, 2, True), ("4", 0.3, 3, False)]
    assert {row["role"] for row in table} == {"ffn"}


def test_layers_that_are_not_named_stay_as_they_are():
    simulated = simulate(copy.deepcopy(NETWORK), ASSIGNMENT)
    found = Switched(simulated, lambda: simulated(X), ["0", "4"]).error(["4"])
    assert found == pytest.approx(relative_error(by_hand(["2"]), by_hand(["2", "4"])), rel=1e-3)


@pytest.mark.parametrize("keep, kept", [(0, 0), (9, 9), (0.0, 0), (0.3, 3), (0.01, 0), (10, None), (0.99, None)])
def test_a_budget_is_a_number_of_layers_or_a_fraction_and_does_not_keep_everything(keep, kept):
    if kept is not None:
        assert layers_to_keep(keep, 10) == kept
        return
    with pytest.raises(ConfigError, match=f"keep is {keep}, which keeps all 10 layers .* keep at most 9"):
        layers_to_keep(keep, 10)


def test_an_error_that_both_halves_have_counts_once():
    """And one of the conditional half alone as often as guidance multiplies it; what has no halves stays as it is."""
    output, error = torch.randn(2, 3), torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(guided(output + error, 5.0) - guided(output, 5.0), error)
    alone = torch.cat([torch.zeros(1, 3), error])
    torch.testing.assert_close(guided(output + alone, 5.0) - guided(output, 5.0), 5 * error)
    assert torch.equal(guided(output[:1], 5.0), output[:1])
