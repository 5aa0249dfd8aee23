"""Inputs that are scaled per token or rotated, simulated and multiplied by torch, against a formula of its own."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rounding import with_refined_branches, with_rounded_weight
from sd_quant.simulation.modelopt import between_roundings, simulate
from sd_quant.simulation.native import PerTokenLinear, with_native_layers
from tests.layers import drawn, statistics_of, turned

pytestmark = pytest.mark.commit

OUTPUTS, INPUTS, TOKENS = 48, 128, 80


def tokens() -> Tensor:
    """[2, tokens, inputs], their magnitudes from 2^-6 to 2^6, with an outlier channel."""
    x = drawn(2, TOKENS, INPUTS, seed=1) * 2.0 ** torch.linspace(-6, 6, TOKENS)[:, None]
    x[..., 7] *= 20
    return x


def module(has_bias: bool) -> nn.Module:
    """A network of one linear, ``layer``."""
    linear = nn.Linear(INPUTS, OUTPUTS, bias=has_bias)
    linear.weight.data = drawn(OUTPUTS, INPUTS)
    if has_bias:
        linear.bias.data = 3 * drawn(OUTPUTS, seed=2)
    return nn.ModuleDict({"layer": linear}).requires_grad_(False)


def row_of(fmt: str, smoothed: bool = False, rank: int = 0, **given) -> LayerAssignment:
    """The row of ``layer``; where it is smoothed its input is multiplied in front of it."""
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
        (row,) = with_refined_branches([row], [weight], statistics, recipe)
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
def test_the_simulation_is_a_formula_in_double_precision(fmt, smoothed, has_bias, given):
    """But for numbers so near to halfway between two codes that fp32 and double precision decide differently.

    Each token by itself, so that the small ones count. Without rotation, or scales per token, it is off by more.
    """
    row, network, x = row_of(fmt, smoothed, **given), module(has_bias), tokens()
    wanted = expected(row, network, x)
    found = simulate(copy.deepcopy(network), {"layer": row})["layer"](x).double()
    bias = 0 if not has_bias else network["layer"].bias.double()
    errors = (found - wanted).norm(dim=-1) / (wanted - bias).norm(dim=-1)
    assert errors.max() < 2e-2 and errors.median() < 1e-4
    exact = network["layer"](x).double()
    assert 3e-3 < ((wanted - exact).norm(dim=-1) / (exact - bias).norm(dim=-1)).median() < 0.3  # rounded, not broken


@pytest.mark.parametrize(
    "fmt, rotation, smoothed, has_bias",
    [("int8", 0, True, True), ("int8", 16, False, False), ("fp8", 0, False, False), ("fp8", 16, True, True)],
)
def test_torchs_own_products_are_the_simulation(fmt, rotation, smoothed, has_bias):
    """In fp32 up to the order of sums and what lies halfway between two codes; in fp16 up to what that rounds."""
    row, network, x = row_of(fmt, smoothed, per_token=True, rotation=rotation), module(has_bias), tokens()
    native = with_native_layers(copy.deepcopy(network), {"layer": row})["layer"]
    assert isinstance(native, PerTokenLinear) and native.linear.bias is None
    simulated = simulate(copy.deepcopy(network), {"layer": row})["layer"](x)
    found = native(x)
    bias = 0 if not has_bias else network["layer"].bias
    errors = (found - simulated).norm(dim=-1) / (simulated - bias).norm(dim=-1)
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
