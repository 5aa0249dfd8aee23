"""Ranges and products of attentions; those of whole networks against what diffusers' processors multiply."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.parts import Heads
from sd_quant.models.sd3 import FAMILY
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import assign_attention, head_factors
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.rewrite import IntegerProducts
from tests.layers import sample_of

from ...joint_attention import CALLS, Joint, calibrated, transformer

pytestmark = pytest.mark.commit

HEADS, WIDTH, INT8 = 3, 16, Pair("int8", "int8")


def drawn_attention(width: int = WIDTH) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    return {f"attn.to_{letter}": torch.randn(HEADS * width, 8) for letter in "qkv"}, torch.randn(12, 8)


def assigned(
    fmt: str, cross: bool = False, width: int = WIDTH, level: float = 4.0, rotary: bool = False
) -> LayerAssignment:
    weights, inputs = drawn_attention(width)
    rows = {name: LayerAssignment(name, "qkv", (HEADS * width, 8)) for name in weights}
    parts = zip(weights, (inputs[:6], inputs[6:], inputs[:1]), strict=True)
    statistics = {name: LayerStatistics("linear", torch.ones(1, 8), sample_of(part.half())) for name, part in parts}
    recipe = Recipe(level, 0.8, enable=Enable(INT8, INT8, fmt))
    return assign_attention("attn", Heads(width, rotary), rows, weights.__getitem__, statistics, recipe, cross)


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


@pytest.mark.parametrize(("given", "reason"), [
    ({"fmt": "int8", "cross": True}, "it reads the text, whose first token is far larger than the others"),
    ({"fmt": "int8", "rotary": True}, "it rotates queries and keys by positions, which sampled inputs do not record"),
    ({"fmt": "int8", "width": 24}, "its heads are 24 wide, no multiple of 16"),
    ({"fmt": "fp8", "width": 24}, "its heads are 24 wide, no multiple of 16"),
    ({"fmt": "int8", "level": 3.0}, "role attention is not in quant_level 3"),
])  # fmt: skip
def test_what_stays_in_high_precision_says_why(given, reason):
    row = assigned(**given)
    assert (row.reason, row.activation_format, row.attention_products) == (reason, None, ())


def integer_error(query: Tensor, key: Tensor, value: Tensor, mean: Tensor | None = None) -> tuple[float, Tensor]:
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


# Two streams, positions or text

NAMES = {
    "sd35": ["transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"],
    "sd3": ["transformer_blocks.0.attn", "transformer_blocks.1.attn"],
    "flux": ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"],
    "pixart": [f"transformer_blocks.{block}.attn{which}" for block in (0, 1) for which in (1, 2)],
}


@torch.no_grad()
def multiplied(joint: Joint, rows: dict[str, LayerAssignment], monkeypatch) -> dict[str, list[Tensor]]:
    """Query, key and value [heads, rows, head_width] by attention, of all calls, and what a value absorbs in it."""
    seen, attend = [], F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        root = query.shape[-1] ** -0.25
        seen.append([heads.transpose(0, 1).flatten(1, 2) for heads in (query * root, key * root, value)])
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    part = joint.part()
    for seed in range(CALLS):
        part(**joint.inputs(seed))
    names = list(joint.family.attentions(joint.network))
    found = {
        name: [torch.cat(calls, 1) for calls in zip(*seen[index :: len(names)], strict=True)]
        for index, name in enumerate(names)
    }
    for name, heads in found.items():
        scale = rows[f"{name}.to_v"].output_scale
        joint_values = f"{name}.add_v_proj" in rows  # no scale is absorbed where two linears make the value
        assert (scale is not None) == (not joint_values and f"{name}.to_out.0" in rows)
        if scale is not None:
            heads[2] = heads[2] * scale.view(len(heads[2]), 1, -1)
    return found


@pytest.mark.parametrize(
    "fmt, name", [(fmt, name) for fmt in ("int8", "fp8") for name in NAMES if name != "flux" or fmt == "fp8"]
)
def test_ranges_are_of_all_streams_as_they_are_multiplied(fmt, name, monkeypatch):
    """Biases and norms included. The sample has every token, if in fp16.

    Of Flux's queries and keys, the norm of each pair: positions that were not seen may turn it into one channel.
    """
    joint, headroom = calibrated(name), 1.25 if fmt == "int8" else 2.0
    rows = joint.rows(fmt)
    found = multiplied(joint, rows, monkeypatch)
    quantized = [name for name, row in rows.items() if row.attention_products]
    assert quantized == [each for each in NAMES[name] if fmt == "fp8" or name != "pixart" or each.endswith("attn1")]
    for each in quantized:
        query, key, value = found[each]
        row, reach = rows[each], torch.abs
        if name == "flux":
            reach = lambda heads: (heads[..., ::2] ** 2 + heads[..., 1::2] ** 2).sqrt()  # noqa: E731
        if fmt == "int8":
            centred = key - row.key_mean[:, None]
            scores = query @ centred.transpose(1, 2)
            largest = [heads.abs().amax((1, 2)) for heads in (query, centred, value, scores)]
            torch.testing.assert_close(row.key_mean, key.mean(1), rtol=2e-2, atol=2e-3)
        else:
            assert row.key_mean is None and row.attention_products == (f"{each}.scores", f"{each}.values")
            largest = [heads.amax().view(1) for heads in (reach(query), reach(key), value.abs())]
        for amax, expected in zip(row.attention_amax, largest, strict=True):
            torch.testing.assert_close(amax, headroom * expected, rtol=1e-2, atol=0)


def test_a_head_of_zeros_has_finite_factors_and_other_norms_than_the_published_models_are_left_alone():
    row = LayerAssignment("attn", "attention", (WIDTH,), activation_format="int8")
    found = head_factors(replace(row, attention_amax=(torch.zeros(HEADS),) * 4))
    assert all(torch.isfinite(factor).all() for factor in (found.query, found.key, found.logit, found.output))
    network = transformer(True)
    assert len(FAMILY.attentions(network)) == 3
    network.register_to_config(qk_norm="layer_norm")
    assert FAMILY.attentions(network) == {}
