"""Codes of weights of four bits: GPTQ against its published update, scales against trying every one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sd_quant.errors import SdQuantError
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.ranges import with_weight_range
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rotation import rotated
from sd_quant.quantization.rounding import (
    DAMPING,
    FEWEST_ROWS,
    damped_hessian,
    with_refined_branch,
    with_rounded_weight,
)
from sd_quant.quantization.row_chunks import layer_of_rows
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests.layers import drawn, sample_of, statistics_of

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
    layer: LayerAssignment, weight: Tensor, rows: Tensor, rounding: str = "gptq", scale_search: bool = False, **given
) -> LayerAssignment:  # fmt: skip
    pair = Pair(layer.format, None)
    enable = Enable(pair, pair, None)
    recipe = Recipe(3.0, None, enable=enable, rounding=rounding, scale_search=scale_search, **given)
    statistics = statistics_of(rows)
    layer = with_refined_branch(layer, weight, statistics, recipe)
    return with_rounded_weight(layer, weight, statistics, recipe)


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
def test_a_branch_is_fitted_to_what_rounding_has_left(fmt):
    """By the exact decomposition of the error, within one percent."""
    weight, rows, pair = drawn(OUTPUTS, INPUTS), inputs(128), Pair(fmt, None)
    before = with_weight_range(replace(row(weight, fmt), low_rank=low_rank(weight, 4)), weight)
    recipe = Recipe(3.0, None, enable=Enable(pair, pair, None), rank=4, branch_rounds=1)
    after = with_refined_branch(before, weight, statistics_of(rows), recipe)
    up, down = after.low_rank
    assert down.shape == (4, INPUTS)
    error = weight - before.rounded_weight(rewritten(weight, before))
    factor = torch.linalg.cholesky(damped_hessian(rows))
    best = torch.linalg.svdvals(error @ factor)[4:].norm()
    assert 0.999 < ((error - up.float() @ down.float()) @ factor).norm() / best < 1.01
    assert torch.equal(after.weight_amax, rewritten(weight, after).abs().amax().view(1))


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


def test_too_few_rows_are_refused():
    weight, reason = drawn(4, INPUTS), f"^calibration has 8 rows of the input of layer, and GPTQ needs {FEWEST_ROWS}"
    with pytest.raises(SdQuantError, match=reason):
        rounded(row(weight, "int4"), weight, inputs(8))


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
