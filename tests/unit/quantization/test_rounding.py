"""Codes of weights of four bits: GPTQ against its published update, scales against trying every one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization import hessians
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.hessians import Hessians, add_rows, blocks_of, diagonal_blocks, hessians_of, rows_of
from sd_quant.quantization.low_rank import low_rank, low_rank_of
from sd_quant.quantization.ranges import with_weight_range
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rotation import rotated
from sd_quant.quantization.rounding import (
    DAMPING,
    FEWEST_ROWS,
    damped_hessian,
    with_refined_branches,
    with_rounded_weight,
)
from sd_quant.quantization.row_chunks import layer_of_rows
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests.layers import drawn, sample_of, statistics_of, turned

from ..calibration.some_statistics import CONVOLUTIONS

pytestmark = pytest.mark.commit

BLOCKED = [name for name, fmt in FORMATS.items() if fmt.block is not None and fmt.onnx_type]
PLAIN = [*BLOCKED, "int4_per_row"]
SEARCHED = [*PLAIN, "int4_in_int8", "q4_1", "q4_k", "q6_k"]  # ggml's: a least number, minimums, scales alone
ROTATIONS = [*((fmt, 0) for fmt in PLAIN), ("int4", 16), ("nvfp4", 16), ("int4_per_row", 16)]  # format, group
OUTPUTS, INPUTS, WIDE = 24, 128, 256


def inputs(count: int, seed: int = 1, size: int = INPUTS) -> Tensor:
    """Rows as a network's are: their numbers go together, and some are much larger than others."""
    return drawn(count, 16, seed=seed) @ drawn(16, size, seed=7) * drawn(size, seed=8).exp() + drawn(count, size)


def row(weight: Tensor, fmt: str, **given) -> LayerAssignment:
    axis = 0 if FORMATS[fmt].static_scale else None
    return LayerAssignment("layer", "ffn", tuple(weight.shape), fmt, None, None, axis, amax_of(weight, fmt), **given)


def amax_of(weight: Tensor, fmt: str) -> Tensor:
    return weight.abs().amax(1) if FORMATS[fmt].static_scale else weight.abs().amax().view(1)


def branched(weight: Tensor, fmt: str, rotation: int) -> LayerAssignment:
    factors = drawn(INPUTS, seed=3).mul(0.3).exp()
    layer = row(weight, fmt, pre_quant_scale=factors, rotation=rotation)
    return with_weight_range(replace(layer, low_rank=low_rank(rewritten(weight, layer), 4)), weight)


def rounded(
    layer: LayerAssignment, weight: Tensor, rows: Tensor, rounding: str = "gptq", scale_search: bool = False,
    hessian: Tensor | None = None, block: int = 0, **given,
) -> LayerAssignment:  # fmt: skip
    pair = Pair(layer.format, None)
    enable = Enable(pair, pair, None)
    recipe = Recipe(3.0, None, enable=enable, rounding=rounding, scale_search=scale_search, hessian=block, **given)
    statistics = replace(statistics_of(rows), hessian=hessian)
    (layer,) = with_refined_branches([layer], [weight], statistics, recipe)
    return with_rounded_weight(layer, weight, statistics, recipe)


def hessian_of(rows: Tensor, block: int) -> Tensor:
    parts = rows.unflatten(1, (-1, block)).transpose(0, 1)
    return parts.mT @ parts


def published(weight: Tensor, rows: Tensor, fmt_name: str) -> Tensor:
    """Optimal Brain Surgeon as GPTQ's paper states it (equations 2 and 3), input by input, in double precision."""
    fmt, left = FORMATS[fmt_name], weight.double().clone()
    width = fmt.block or INPUTS
    hessian = rows.double().T @ rows.double()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.linalg.inv(hessian)
    numbers = torch.empty_like(weight)
    of_all = fmt.scales(weight, weight.abs().amax(1, keepdim=True))
    for column in range(weight.shape[1]):
        if column % width == 0:
            block = slice(column, column + width)
            scales = fmt.scales(left[:, block].float(), weight.abs().amax(1, keepdim=True))
            if fmt.row_scale:
                scales = of_all[0][:, column // width, None], of_all[1]
        rounded = fmt.dequantize(fmt.quantize(left[:, block].float(), *scales), *scales)[:, column % width]
        numbers[:, column] = rounded
        error = (left[:, column] - rounded) / inverse[column, column]
        left[:, column:] -= error[:, None] * inverse[column, column:]
        left[:, column] = rounded
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return numbers


@pytest.mark.parametrize("fmt", SEARCHED)
def test_gptq_is_the_published_update(fmt):
    """But for numbers so near to halfway between two codes that fp32 and double precision decide differently."""
    weight, rows = drawn(OUTPUTS, WIDE), inputs(64, size=WIDE)
    codes, scales = rounded(row(weight, fmt), weight, rows).codes_and_scales(weight)
    numbers = FORMATS[fmt].dequantize(codes, *scales)
    assert torch.isclose(numbers, published(weight, rows, fmt), rtol=1e-4).float().mean() > 0.99


@pytest.mark.parametrize("fmt", [*SEARCHED, "fp8"])
def test_every_block_has_the_best_scale_of_those_tried(fmt):
    """Tried one by one, and for whole rows the error is smaller than with the format's own scale."""
    weight = drawn(OUTPUTS, WIDE) ** 3
    layer = rounded(row(weight, fmt), weight, inputs(8, size=WIDE), "nearest", scale_search=True)
    table, block = FORMATS[fmt], FORMATS[fmt].block or WIDE
    amax = weight.abs().amax(1, keepdim=True)

    def errors(codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
        return (table.dequantize(codes, *scales) - weight).square().unflatten(1, (-1, block)).sum(-1)

    tried = table.tried_scales(weight, amax)
    least = torch.stack([errors(table.quantize(weight, *scales), scales) for scales in tried]).amin(0)
    found = errors(*layer.codes_and_scales(weight))
    torch.testing.assert_close(found.flatten(), least.flatten())
    assert torch.equal(tried[0][0], table.scales(weight, amax)[0])
    assert len(tried) == 1 or found.sum() < 0.98 * errors(table.quantize(weight, *tried[0]), tried[0]).sum()


def test_four_over_six_worked_by_hand():
    """Of a block's numbers 12 and 9: with 12 as code 6, nine lies between 4 and 6; with 12 as code 4 it is code 3."""
    fmt, weight = FORMATS["nvfp4"], torch.tensor([[12.0, *15 * [9.0]], 16 * [36.0]])
    layer = row(weight, "nvfp4")
    chosen = rounded(layer, weight, inputs(8)[:, :16], "nearest", scale_search=True)
    plain, better = (
        fmt.dequantize(codes, *scales) for codes, scales in (each.codes_and_scales(weight) for each in (layer, chosen))
    )
    assert plain[0].tolist() == [pytest.approx(12, rel=0.04), *15 * [pytest.approx(8, rel=0.04)]]
    assert better[0].tolist() == [pytest.approx(12, rel=0.04), *15 * [pytest.approx(9, rel=0.04)]]
    assert torch.equal(plain[1], better[1])


@pytest.mark.parametrize("fmt", PLAIN)
def test_smoothed_and_split_weights_are_rounded_for_the_smoothed_input(fmt):
    """The branch is not rounded, and the rows are those that the codes are multiplied with; so it is where rotated."""
    weight, rows = drawn(OUTPUTS, INPUTS), inputs(64)
    factors = drawn(INPUTS, seed=3).exp()
    layer = row(weight, fmt, pre_quant_scale=factors, low_rank=(drawn(OUTPUTS, 4).half(), drawn(4, INPUTS).half()))
    smoothed = rewritten(weight, layer)
    chosen = rounded(replace(layer, weight_amax=amax_of(smoothed, fmt)), weight, rows)
    expected = rounded(row(smoothed, fmt), smoothed, rows * factors)
    assert all(map(torch.equal, chosen.rounded, expected.rounded))
    rotated_weight, rotated_rows = (rotated(x, 16) for x in (weight, rows))
    chosen = rounded(replace(row(rotated_weight, fmt), rotation=16), weight, rows, scale_search=True)
    expected = rounded(row(rotated_weight, fmt), rotated_weight, rotated_rows, scale_search=True)
    assert all(map(torch.equal, chosen.rounded, expected.rounded))
    torch.testing.assert_close(chosen.rounded_weight(weight), rotated(expected.rounded_weight(rotated_weight), 16))


@pytest.mark.parametrize("fmt", BLOCKED)
def test_a_shared_branch_is_fitted_to_what_rounding_has_left_of_all_its_layers(fmt):
    """By the exact decomposition of the errors on top of each other, within one percent, with one ``down``."""
    weights, rows = [drawn(OUTPUTS, INPUTS), 0.3 * drawn(8, INPUTS, seed=4)], inputs(128)
    branches = low_rank_of(weights, 4)
    before = [with_weight_range(replace(row(w, fmt), low_rank=b), w) for w, b in zip(weights, branches, strict=True)]
    pair = Pair(fmt, None)
    recipe = Recipe(3.0, None, enable=Enable(pair, pair, None), rank=4, branch_rounds=1)
    after = with_refined_branches(before, weights, statistics_of(rows), recipe)
    assert after[0].low_rank[1] is after[1].low_rank[1] and after[0].low_rank[1].shape == (4, INPUTS)
    rounded_residuals = [each.rounded_weight(rewritten(w, each)) for each, w in zip(before, weights, strict=True)]
    errors = torch.cat([w - rounded for w, rounded in zip(weights, rounded_residuals, strict=True)])
    fitted = torch.cat([each.low_rank[0].float() @ each.low_rank[1].float() for each in after])
    factor = torch.linalg.cholesky(damped_hessian(rows))
    best = torch.linalg.svdvals(errors @ factor)[4:].norm()
    assert 0.999 < ((errors - fitted) @ factor).norm() / best < 1.01
    for each, weight in zip(after, weights, strict=True):
        assert torch.equal(each.weight_amax, rewritten(weight, each).abs().amax().view(1))


def test_inputs_that_are_always_zero_compensate_nothing():
    weight, rows, fmt = drawn(4, 192), drawn(32, 192), FORMATS["int4"]
    rows[:, ::2] = 0  # inputs that are always zero compensate nothing
    for given in (rows, torch.zeros(32, 192)):
        codes, *scales = rounded(row(weight, "int4"), weight, given).rounded
        assert torch.equal(codes[:, 0], fmt.quantize(weight, *scales)[:, 0])


@pytest.mark.parametrize("fmt", SEARCHED)
def test_some_rows_of_a_weight_have_their_own_codes(fmt):
    weight = drawn(OUTPUTS, WIDE)
    layer = rounded(row(weight, fmt), weight, inputs(32, size=WIDE), scale_search=True)
    codes, scales = layer.codes_and_scales(weight)
    some, its_scales = layer_of_rows(layer, slice(5, 9)).codes_and_scales(weight[5:9])
    assert torch.equal(some.float(), codes[5:9].float())
    assert torch.equal(FORMATS[fmt].dequantize(some, *its_scales), FORMATS[fmt].dequantize(codes, *scales)[5:9])


WITHOUT_HESSIAN = "^quantize.hessian is 128, and the statistics have {} of layer layer; calibrate with quantize.hessian"
FORGED = torch.full((1, INPUTS, INPUTS), 2.0)
FORGED[0].fill_diagonal_(1.0)


@pytest.mark.parametrize(
    ("rows", "given", "error", "reason"),
    [
        (8, {}, SdQuantError, f"^calibration has 8 rows of the input of layer, and GPTQ needs {FEWEST_ROWS}"),
        (32, {"block": 128}, ConfigError, WITHOUT_HESSIAN.format("no Hessian")),
        (32, {"block": 128, "hessian": torch.zeros(2, 64, 64)}, ConfigError,
         WITHOUT_HESSIAN.format("one in blocks of 64")),
        (32, {"block": INPUTS, "hessian": FORGED}, SdQuantError, "a Hessian that is not positive definite"),
    ],
    ids=["rows", "no Hessian", "other blocks", "forged"],
)  # fmt: skip
def test_too_few_rows_are_refused_and_hessians_that_are_none(rows, given, error, reason):
    weight = drawn(4, INPUTS)
    with pytest.raises(error, match=reason):
        rounded(row(weight, "int4"), weight, inputs(rows), **given)


@pytest.mark.parametrize("fmt, rotation", ROTATIONS)
def test_with_the_hessian_of_the_sampled_rows_codes_are_those_of_the_rows(fmt, rotation, monkeypatch):
    """With the same damping and blocks, smoothed, rotated and beside a branch, but for ties that fp32 decides."""
    size = max(64, FORMATS[fmt].block or 0)
    monkeypatch.setattr("sd_quant.quantization.rounding.COLUMNS", size)
    monkeypatch.setattr("sd_quant.quantization.rounding.WHOLE_DAMPING", DAMPING)
    weight, rows = drawn(OUTPUTS, INPUTS), inputs(128)
    layer = branched(weight, fmt, rotation)
    by_rows = rounded(layer, weight, rows, scale_search=True)
    others = inputs(16, seed=9)  # of which only their number counts
    hessian = hessian_of(rows, size)
    by_hessian = rounded(layer, weight, others, scale_search=True, hessian=hessian, block=size)
    assert torch.equal(hessian, hessian_of(rows, size))
    numbers = [FORMATS[fmt].dequantize(*each.rounded) for each in (by_rows, by_hessian)]
    assert torch.isclose(*numbers, rtol=1e-4).float().mean() > 0.99


# Hessians of all rows, against torch's own products and convolutions


LINEAR = nn.Linear(160, 1)


def summed(layer: nn.Module, width: int, block: int, *inputs: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(blocks_of(width, block))
    for step, x in enumerate(inputs):
        add_rows(found, layer, x, step)
    return found


@pytest.mark.parametrize("block", [64, 128, 160, 4096])
def test_it_is_the_diagonal_of_the_product_of_all_rows(block, monkeypatch):
    monkeypatch.setattr(hessians, "ROWS_AT_ONCE", 7)
    inputs = drawn(4, 9, 160), drawn(3, 160, seed=1)
    rows = torch.cat([x.flatten(0, -2) for x in inputs]).double()
    whole, found = rows.T @ rows, summed(LINEAR, 160, block, *inputs)
    for index, blocks in enumerate(diagonal_blocks(found, 160, None, 0)):
        part = slice(index * block, (index + 1) * block)
        torch.testing.assert_close(blocks.double(), whole[part, part], rtol=1e-5, atol=1e-4)
    assert found.dtype == torch.float32 and len(found) == -(-160 // block)
    # what fp16 cannot hold is cut, and fp16 is summed in fp32
    assert summed(nn.Linear(1, 1), 1, 64, torch.tensor([[1e30], [-1e30]])).item() == 2 * torch.tensor(65504.0) ** 2
    assert summed(nn.Linear(1, 1), 1, 64, torch.full((4, 1), 60000.0).half()).item() == 4 * 60000.0**2


@pytest.mark.parametrize("most", [7, 1024])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_rows_of_a_convolution_are_what_its_outputs_multiply(options, most, monkeypatch):
    """Of every k-th output, where there are more than the most; as many steps as k have each of them once."""
    monkeypatch.setattr(hessians, "MOST_POSITIONS", most)
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 5, **options), torch.randn(2, 3, 9, 7)
    output = conv(x).movedim(1, -1).flatten(1, 2)  # [samples, positions, 5]
    every = -(-output.shape[1] // most)
    steps = [rows_of(conv, x, step) for step in range(every)]
    assert all(len(rows) <= 2 * most for rows in steps) and (every > 1) == (most == 7)
    for step, rows in enumerate(steps):
        products = rows @ conv.weight.flatten(1).T + conv.bias
        torch.testing.assert_close(products, output[:, step::every].flatten(0, 1))
    assert torch.equal(rows_of(conv, x, every), steps[0])


@pytest.mark.parametrize("factors", [None, drawn(160, seed=5).exp()], ids=["plain", "smoothed"])
@pytest.mark.parametrize("rotation", [0, 4, 16])
def test_it_becomes_that_of_smoothed_and_rotated_inputs(factors, rotation):
    x = drawn(500, 160)
    rows = turned(x if factors is None else x * factors, rotation)
    for index, block in enumerate(diagonal_blocks(summed(LINEAR, 160, 64, x), 160, factors, rotation)):
        part = rows[:, 64 * index : 64 * (index + 1)]
        torch.testing.assert_close(block.double(), part.T @ part, rtol=1e-4, atol=1e-2)
    assert index == 2 and block.shape == (32, 32)


def recipe(conv: str = "int4", linear: str = "int4", **given) -> Recipe:
    enable = Enable(Pair(conv, None), Pair(linear, None), None)
    return Recipe(**{"quant_level": 1.0, "alpha": None, "enable": enable, "rounding": "gptq", "hessian": 256} | given)


ROLES = {"conv": "conv", "to_q": "qkv", "to_k": "qkv", "ff": "ffn", "time": "excluded", "out": "linear"}
SHARED = [SharedInput(("to_q", "to_k", "time")), SharedInput(("ff",)), SharedInput(("time",))]


def test_those_are_summed_whose_codes_gptq_may_choose_at_any_level():
    linears = (("to_q", "to_k"), ("ff",))
    assert hessians_of(ROLES, SHARED, recipe()) == Hessians(256, (*linears, ("conv",), ("out",)))
    assert hessians_of(ROLES, SHARED, recipe(conv="int8")) == Hessians(256, (*linears, ("out",)))
    for none in ({"hessian": 0}, {"rounding": "nearest"}, {"conv": "int8", "linear": "int8"}):
        assert not hessians_of(ROLES, SHARED, recipe(**none)).readers


# The low-rank branch against the exact singular values, and what SVDQuant gains on a layer with outliers


SPECTRA = {
    "1 / i": lambda i: 1 / i, "1 / sqrt(i)": lambda i: i**-0.5, "exponential": lambda i: torch.exp(-i / 20),
    "few large": lambda i: torch.where(i <= 8, 100.0, 1.0), "flat": lambda i: torch.ones_like(i),
}  # fmt: skip


def with_spectrum(shape: tuple[int, int], spectrum: str) -> Tensor:
    u, _, v = torch.linalg.svd(drawn(*shape), full_matrices=False)
    return (u * SPECTRA[spectrum](torch.arange(min(shape)) + 1.0)) @ v


def over_the_best(weight: Tensor, rank: int) -> float:
    up, down = low_rank(weight, rank)
    assert up.shape == (len(weight), rank) and down.shape == (rank, weight.shape[1])
    residual = weight.double() - up.double() @ down.double()
    return (residual.norm() / torch.linalg.svdvals(weight)[rank:].double().norm()).item()


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_residual_is_within_one_percent_of_the_smallest(spectrum):
    for shape, ranks in {(160, 640): (16, 32), (640, 160): (16, 32), (48, 96): (1, 16)}.items():
        weight = with_spectrum(shape, spectrum)
        for rank in ranks:
            assert 0.999 < over_the_best(weight, rank) < 1.01, (shape, rank)


def test_with_a_factor_it_is_the_product_that_the_branch_is_nearest_to():
    weight, inputs = drawn(128, 96), drawn(400, 96, seed=1) * torch.linspace(0.1, 3, 96)
    factor = torch.linalg.cholesky(inputs.T @ inputs / len(inputs))
    best = torch.linalg.svdvals(weight @ factor)[16:].norm()
    branches = (low_rank(weight, 16, factor), low_rank(weight, 16))
    left, of_the_weight = (((weight - up.float() @ down.float()) @ factor).norm() / best for up, down in branches)
    assert 0.999 < left < 1.01 and of_the_weight > 1.1


def test_a_shared_branch_is_that_of_the_weights_on_top_of_each_other():
    """Whose residual is within one percent of the smallest, and for one weight it is the weight's own."""
    weights = [with_spectrum((96, 128), "1 / i"), 3 * drawn(64, 128, seed=1) / 16, drawn(32, 128, seed=2) / 16]
    branches = low_rank_of(weights, 16)
    assert all(down is branches[0][1] for _, down in branches)
    left = torch.cat([w - up.float() @ down.float() for w, (up, down) in zip(weights, branches, strict=True)])
    assert 0.999 < left.norm() / torch.linalg.svdvals(torch.cat(weights))[16:].norm() < 1.01
    assert all(map(torch.equal, low_rank_of(weights[:1], 16)[0], low_rank(weights[0], 16)))


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_factors_are_fp16_and_share_the_magnitude(magnitude):
    """A weight of zeros has zeros; the same weight has the same, and torch's random numbers are left alone."""
    weight = drawn(96, 48) * magnitude
    torch.manual_seed(7)
    up, down = low_rank(weight, 8)
    after = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(4)) and all(map(torch.equal, (up, down), low_rank(weight, 8)))
    assert all(factor.dtype == torch.float16 and factor.isfinite().all() for factor in (up, down))
    torch.testing.assert_close(up.float().norm(dim=0), down.float().norm(dim=1), rtol=1e-2, atol=0)
    up, down = low_rank(0 * weight, 4)
    assert not (up @ down).any()


@pytest.mark.parametrize(
    "rank, shape, expected",
    [(0, (4, 8), 0), (3, (4, 8), 3), (0.5, (4, 8), 2), (0.05, (640, 2560), 32), (0.001, (8, 4), 1)],
)
def test_a_rank_is_a_number_or_a_share_of_the_shorter_side(rank, shape, expected):
    assert Recipe(3.0, 0.5, rank=rank).rank_of("ffn", shape) == expected


WIDTH, TOKENS, STEPS = 512, 512, 20


class OutlierLayer:
    """A linear with Gaussian weights whose input has two channels much larger than the others, and rows to test on."""

    def __init__(self, seed: int):
        random = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(512, WIDTH, generator=random)
        rows = torch.randn(2, TOKENS, WIDTH, generator=random)
        rows[..., 100] *= 30
        rows[..., 300] *= 20
        calibration, self.rows = rows
        amax = calibration.abs().amax(0).repeat(STEPS, 1)
        self.statistics = LayerStatistics("linear", amax, sample_of(calibration[:128].half()))

    def assignment(self, alpha: float | str | None, rank: int) -> LayerAssignment:
        enable = Enable(Pair("int4", None), Pair("int4", "int4"), None)
        smoothing = "none" if alpha is None else "folded"
        recipe = Recipe(2.5, alpha, enable=enable, per_channel=False, rank=rank, smoothing=smoothing)
        found = derive({"0": "ffn"}, lambda name: self.weight, {"0": self.statistics}, recipe, [SharedInput(("0",))])
        return found["0"]

    def error(self, layer: LayerAssignment) -> float:
        network = nn.Sequential(nn.Linear(WIDTH, 512, bias=False)).requires_grad_(False)
        network[0].weight.copy_(self.weight)
        return relative_error(self.rows @ self.weight.T, simulate(network, {"0": layer})(self.rows))


SVDQUANT = {("auto", 32): 0.09, (0.5, 32): 0.092, (0.5, 64): 0.09}  # the largest error by alpha and rank


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_svdquant_has_at_most_half_the_error_of_plain_rounding(seed):
    """Measured over 3 seeds: plain 0.215 to 0.223, auto 0.073 to 0.079, alpha 0.5 0.085 to 0.091, with rank 64 0.076
    to 0.081; without the branch 0.110, without smoothing 0.196. Assignments report it of the 128 rows that
    calibration kept; measured within 2.3 %.
    """
    layer = OutlierLayer(seed)
    plain = layer.error(layer.assignment(None, 0))
    assert 0.2 < plain < 0.24
    for chosen, limit in SVDQUANT.items():
        assignment = layer.assignment(*chosen)
        found = layer.error(assignment)
        assert found < limit and found < plain / 2
        assert assignment.output_error == pytest.approx(found, rel=0.05)
