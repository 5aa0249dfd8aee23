"""The low-rank branch against the exact singular values, and what SVDQuant gains on a layer with outliers."""

import pytest
import torch
from torch import Tensor, nn

from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.low_rank import low_rank, low_rank_of
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests.layers import drawn, sample_of

pytestmark = pytest.mark.commit

SPECTRA = {
    "1 / i": lambda i: 1 / i, "1 / sqrt(i)": lambda i: i**-0.5, "exponential": lambda i: torch.exp(-i / 20),
    "few large": lambda i: torch.where(i <= 8, 100.0, 1.0), "flat": lambda i: torch.ones_like(i),
}  # fmt: skip


def with_spectrum(shape: tuple[int, int], spectrum: str) -> Tensor:
    u, _, v = torch.linalg.svd(drawn(*shape), full_matrices=False)
    return (u * SPECTRA[spectrum](torch.arange(min(shape)) + 1.0)) @ v


def over_the_best(weight: Tensor, rank: int) -> float:
    """Norm of the residual over that of the exact truncated decomposition's."""
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
        """Of the output on the test rows."""
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
