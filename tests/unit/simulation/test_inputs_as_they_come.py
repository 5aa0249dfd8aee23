"""Inputs that are scaled per token or rotated, simulated and multiplied by torch, against a formula of its own."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sd_quant.models.unet import shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rounding import with_rounded_weight
from sd_quant.quantization.statistics import LayerStatistics, Sample
from sd_quant.simulation.joined import alike, join_projections
from sd_quant.simulation.modelopt import between_roundings, restorable, simulate
from sd_quant.simulation.native import NativeLinear, PerTokenLinear, with_native_layers

OUTPUTS, INPUTS, TOKENS = 48, 128, 80


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def recipe_of(fmt: str, **given) -> Recipe:
    pair = Pair(fmt, fmt)
    return Recipe(3.0, None, enable=Enable(pair, pair, None), per_channel=fmt == "int8", **given)


def row_of(fmt: str, smoothed: bool = False, rank: int = 0, **given) -> LayerAssignment:
    """The row of ``layer``; where it is smoothed its input is multiplied in front of it."""
    recipe, weight = recipe_of(fmt, **given), drawn(OUTPUTS, INPUTS)
    row = LayerAssignment("layer", "ffn", (OUTPUTS, INPUTS))
    if smoothed:
        row = replace(row, pre_quant_scale=(drawn(INPUTS, seed=3) / 2).exp().half().float())
    if rank:
        row = replace(row, low_rank=low_rank(rewritten(weight, row), rank))
    row = with_ranges(row, weight, InputRange(1.0 if recipe.per_token else 100.0), recipe)
    if FORMATS[fmt].block is not None and given.get("rounding") == "gptq":
        rows = tokens().flatten(0, 1)
        sample = Sample(rows, torch.arange(len(rows)).double())
        row = with_rounded_weight(row, weight, LayerStatistics("linear", rows.abs().amax(0)[None], sample), recipe)
    return row


def turned(x: Tensor, group: int) -> Tensor:
    """``x`` rotated, in double precision, with the published matrix of four."""
    if not group:
        return x.double()
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double() / 2
    matrix = four
    while len(matrix) < group:
        matrix = torch.kron(matrix, four)
    return (x.double().unflatten(-1, (-1, group)) @ matrix).flatten(-2)


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
    stored, its_scales = row.rounded[:1] + (row.rounded[1:],) if row.rounded else (None, ())
    if stored is None:
        amax = row.weight_amax[:, None] if row.weight_axis == 0 else row.weight_amax
        its_scales = fmt.scales(rotated_weight.float(), amax)
        stored = fmt.quantize(rotated_weight.float(), *its_scales)
    product = codes @ fmt.dequantize(stored, *its_scales).double().T * largest
    return product + branch + (0 if bias is None else bias.double())


CASES = [
    ("int8", {"per_token": True}),
    ("int8", {"per_token": True, "rotation": 16}),
    ("int8", {"per_token": True, "rotation": 64, "rank": 4}),
    ("fp8", {"per_token": True}),
    ("fp8", {"per_token": True, "rotation": 4}),
]
BLOCKS = [
    ("int4", {"rotation": 64}),
    ("int4", {"rotation": 64, "rank": 4, "rounding": "gptq"}),
    ("mxfp4", {"rotation": 16}),
    ("nvfp4", {"rotation": 16, "rank": 4}),
]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("smoothed", [True, False])
@pytest.mark.parametrize("fmt, given", CASES + BLOCKS)
def test_the_simulation_is_a_formula_in_double_precision(fmt, given, smoothed, has_bias):
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
    assert ((wanted - exact).norm(dim=-1) / (exact - bias).norm(dim=-1)).median() > 3e-3  # it is rounded


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_small_tokens_err_as_little_as_large_ones(fmt):
    """With one scale for all tokens INT8 makes zeros of the smallest."""
    network, x = module(False), tokens()
    exact = network["layer"](x)
    dynamic, static = (
        simulate(copy.deepcopy(network), {"layer": row})["layer"](x)
        for row in (row_of(fmt, per_token=True), row_of(fmt))
    )
    errors, before = ((found - exact).norm(dim=-1) / exact.norm(dim=-1) for found in (dynamic, static))
    assert errors.max() < (0.08 if fmt == "int8" else 0.1)
    if fmt == "int8":
        assert before[:, 0].min() > 0.4


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("smoothed", [True, False])
@pytest.mark.parametrize("rotation", [0, 16])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
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


def test_a_model_of_modelopts_does_not_hold_them():
    plain = row_of("int8")
    assert restorable({"layer": plain})
    for given in ({"per_token": True}, {"per_token": True, "rotation": 4}, {"rotation": 4}):
        assert not restorable({"layer": replace(plain, **given)})


@pytest.mark.parametrize("fmt, given", [*CASES[:2], BLOCKS[0]])
def test_inputs_halfway_to_what_their_codes_stand_for_have_the_same_codes(fmt, given):
    row, x = row_of(fmt, True, **given), tokens()
    layer = simulate(module(True), {"layer": row})["layer"]
    moved = between_roundings(layer, x)
    assert relative_error(x, moved) > 1e-3
    assert relative_error(layer.input_quantizer(x), layer.input_quantizer(moved)) < 2e-3
    assert relative_error(layer(x), layer(moved)) < 2e-3


@pytest.mark.parametrize("other", [{"per_token": False}, {"rotation": 0}, {"rotation": 4}])
def test_projections_of_other_codes_stay_apart(other):
    row = row_of("int8", per_token=True, rotation=16)
    assert alike([row, row]) and not alike([row, replace(row, **other)])


@torch.no_grad()
def test_joined_projections_compute_what_they_do_apart(calibrated):
    recipe = Recipe(3.0, 0.8, collect_method="min-max", per_token=True, rotation=16)
    unet = calibrated.part().unet
    assignment = derive(
        calibrated.roles, lambda name: unet.get_submodule(name).weight, calibrated.statistics.layers, recipe,
        shared_inputs(calibrated.roles),
    )  # fmt: skip
    together = copy.deepcopy(unet)
    rows = join_projections(together, assignment)
    joined = [row for name, row in rows.items() if name.endswith(("to_qkv", "to_kv"))]
    assert joined and all((row.per_token, row.rotation, row.activation_amax) == (True, 16, 1.0) for row in joined)
    outputs = []
    for network in (with_native_layers(together, rows), with_native_layers(copy.deepcopy(unet), assignment)):
        kinds = {type(module) for module in network.modules() if isinstance(module, NativeLinear | PerTokenLinear)}
        assert kinds == {NativeLinear, PerTokenLinear}
        part = calibrated.part()
        part.unet = network
        outputs.append(part(**calibrated.calls[0]))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
