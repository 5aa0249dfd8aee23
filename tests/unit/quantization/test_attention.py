import pytest
import torch
from torch import Tensor

from sd_quant.models.parts import Heads
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import assign_attention, head_factors
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.rewrite import IntegerProducts
from tests.layers import sample_of

pytestmark = pytest.mark.commit

HEADS, WIDTH = 3, 16


def drawn_attention(width: int = WIDTH) -> tuple[dict[str, Tensor], Tensor]:
    """Weights of query, key and value, and the rows that they read."""
    torch.manual_seed(0)
    return {f"attn.to_{letter}": torch.randn(HEADS * width, 8) for letter in "qkv"}, torch.randn(12, 8)


def assigned(fmt: str, cross: bool = False, width: int = WIDTH, level: float = 4.0) -> LayerAssignment:
    """The row of an attention; each of its linears has a part of the rows that it reads."""
    (weights, inputs), int8 = drawn_attention(width), Pair("int8", "int8")
    rows = {name: LayerAssignment(name, "qkv", (HEADS * width, 8)) for name in weights}
    parts = zip(weights, (inputs[:6], inputs[6:], inputs[:1]), strict=True)
    statistics = {name: LayerStatistics("linear", torch.ones(1, 8), sample_of(part.half())) for name, part in parts}
    recipe = Recipe(level, 0.8, enable=Enable(int8, int8, fmt))
    return assign_attention("attn", Heads(width), rows, weights.__getitem__, statistics, recipe, cross)


def test_integers_have_ranges_for_each_head_over_all_rows_that_the_attention_reads():
    weights, inputs = drawn_attention()
    query, key, value = (
        (torch.cat([inputs, inputs[:1]]).half().float() @ weight.T).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        for weight in weights.values()
    )
    query, key = query * WIDTH**-0.25, key * WIDTH**-0.25
    row = assigned("int8")
    mean = key.mean(1)
    torch.testing.assert_close(row.key_mean, mean, rtol=1e-3, atol=1e-3)
    key = key - mean[:, None]
    scores = query @ key.transpose(1, 2)
    for amax, heads in zip(row.attention_amax, (query, key, value, scores), strict=True):
        torch.testing.assert_close(amax, 1.25 * heads.abs().amax((1, 2)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fmt": "int8", "cross": True}, "it reads the text, whose first token is far larger than the others"),
        ({"fmt": "int8", "width": 24}, "its heads are 24 wide, no multiple of 16"),
        ({"fmt": "fp8", "width": 24}, "its heads are 24 wide, no multiple of 16"),
        ({"fmt": "int8", "level": 3.0}, "role attention is not in quant_level 3"),
    ],
)
def test_what_stays_in_high_precision_says_why(given, reason):
    row = assigned(**given)
    assert (row.reason, row.activation_format, row.attention_products) == (reason, None, ())


def test_a_head_of_zeros_has_finite_factors():
    zeros = (torch.zeros(HEADS),) * 4
    row = LayerAssignment("attn", "attention", (WIDTH,), activation_format="int8", attention_amax=zeros)
    found = head_factors(row)
    assert all(torch.isfinite(factor).all() for factor in (found.query, found.key, found.logit, found.output))


def integer_error(query: Tensor, key: Tensor, value: Tensor, mean: Tensor | None = None) -> tuple[float, Tensor]:
    """How far the two products of integers are from exact ones, and the exact output."""
    mean = key.mean((0, 2)) if mean is None else mean
    scores = query @ (key - mean[:, None]).transpose(2, 3)
    ranges = tuple(heads.abs().amax((0, 2, 3)) for heads in (query, key - mean[:, None], value, scores))
    row = LayerAssignment(
        "attn", "attention", (WIDTH,), activation_format="int8", attention_amax=ranges, key_mean=mean.half().float()
    )
    exact = (query @ key.transpose(2, 3)).softmax(-1) @ value
    return ((IntegerProducts(row)(query, key, value) - exact).norm() / exact.norm()).item(), exact


def test_attention_spread_over_4096_tokens_keeps_its_values():
    """Of a softmax with a scale that holds 1, every probability of 1/4096 becomes zero, and so does the output."""
    torch.manual_seed(1)
    query, key = 0.5 * torch.randn(1, HEADS, 8, WIDTH), 0.5 * torch.randn(1, HEADS, 4096, WIDTH)
    value = 1 + torch.randn(1, HEADS, 4096, WIDTH)
    error, exact = integer_error(query, key, value)
    assert error < 5e-3
    softmax = (query @ key.transpose(2, 3)).softmax(-1)
    naive = (softmax * 255).round() / 255 @ value
    assert (naive - exact).norm() / exact.norm() > 0.9


def test_the_mean_of_the_keys_is_not_paid_for_with_codes():
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, HEADS, 64, WIDTH) for _ in "qkv")
    key = key + 40 * torch.randn(HEADS, 1, WIDTH)
    without, _ = integer_error(query, key, value, mean=torch.zeros(HEADS, WIDTH))
    subtracted, _ = integer_error(query, key, value)
    assert subtracted < 0.03 < without / 3
