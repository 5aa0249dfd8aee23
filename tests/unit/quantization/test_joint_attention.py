"""The ranges of attentions of two streams, with positions or of text against what diffusers' processors multiply."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.parts import Heads
from sd_quant.models.sd3 import FAMILY
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import (
    DRAWS,
    FLOAT_HEADROOM,
    INTEGER_HEADROOM,
    SIDE,
    assign_attention,
    at_positions,
)
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import LayerStatistics

from ...joint_attention import CALLS, Joint, calibrated, transformer
from ...layers import sample_of

pytestmark = pytest.mark.commit

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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_ranges_are_of_all_streams_as_they_are_multiplied(fmt, name, monkeypatch):
    """Biases and norms included. The sample has every token, if in fp16.

    Of Flux's queries and keys in FP8, each pair's norm: other positions than those that were seen may turn it into one
    channel. Its keys in integers, and its scores, are sampled at other positions than those of the calls.
    """
    joint, headroom = calibrated(name), INTEGER_HEADROOM if fmt == "int8" else FLOAT_HEADROOM
    rows = joint.rows(fmt)
    found = multiplied(joint, rows, monkeypatch)
    quantized = [name for name, row in rows.items() if row.attention_products]
    assert quantized == [each for each in NAMES[name] if fmt == "fp8" or name != "pixart" or each.endswith("attn1")]
    for each in quantized:
        query, key, value = found[each]
        row, reach = rows[each], torch.abs
        if name == "flux":
            reach = lambda heads: (heads[..., ::2] ** 2 + heads[..., 1::2] ** 2).sqrt()  # noqa: E731
        largest = [reach(query), reach(key), value.abs()]
        if fmt == "int8":
            centred = key - row.key_mean[:, None]
            scores = query @ centred.transpose(1, 2)
            largest = [heads.amax((1, 2)) for heads in (reach(query), centred.abs(), value.abs(), scores.abs())]
            if name != "flux":
                torch.testing.assert_close(row.key_mean, key.mean(1), rtol=2e-2, atol=2e-3)
        else:
            assert row.key_mean is None and row.attention_products == (f"{each}.scores", f"{each}.values")
            largest = [heads.amax().view(1) for heads in largest]
        for index, (amax, expected) in enumerate(zip(row.attention_amax, largest, strict=True)):
            if name == "flux" and fmt == "int8" and index in (1, 3):
                assert (amax > expected).all() and (amax < 1.6 * headroom * expected).all()
            else:
                torch.testing.assert_close(amax, headroom * expected, rtol=1e-2, atol=0)


def test_the_mean_of_rotary_keys_is_theirs_where_they_hardly_rotate():
    """Keys that are all alike: of 5 positions the first turns nothing, and fast channels cancel out at the others."""
    heads, rows, constant = Heads(128, (16, 56, 56)), 100, torch.ones(128)
    names = {f"attn.to_{letter}": torch.zeros(128, 4) for letter in "qkv"}
    layers = {name: LayerAssignment(name, "qkv", (128, 4)) for name in names}
    seen = {name: LayerStatistics("linear", torch.ones(1, 4), sample_of(torch.ones(rows, 4).half())) for name in names}
    int8 = Pair("int8", "int8")
    row = assign_attention(
        "attn", heads, layers, names.__getitem__, seen, Recipe(4.0, 0.8, enable=Enable(int8, int8, "int8")),
        cross=False, bias_of=lambda name: constant,
    )  # fmt: skip
    mean, root = row.key_mean[0] * 128**0.25, 1 / (1 + DRAWS)
    torch.testing.assert_close(mean[:16], torch.ones(16), rtol=1e-3, atol=1e-3)  # of the axis that counts images
    for axis in (mean[16:72], mean[72:]):
        torch.testing.assert_close(axis[:8], torch.full((8,), root), rtol=0, atol=0.15)
        torch.testing.assert_close(axis[-8:], torch.ones(8), rtol=0, atol=0.05)


def test_positions_turn_pairs_of_channels_as_diffusers_does():
    """At each of the drawn positions, by ``apply_rotary_emb`` with the angles of FluxPosEmbed."""
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    axes, heads = (4, 6, 6), torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(1))
    found = at_positions(heads, axes, torch.Generator().manual_seed(0))
    assert found.shape == (1 + DRAWS, 2, 50, 16) and torch.equal(found[0], heads)
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1 if axis == 0 else SIDE, (DRAWS, 1, 50, 1), generator=random) for axis in range(3)]
    for index in range(DRAWS):
        ids = torch.stack([axis[index, 0, :, 0] for axis in drawn], dim=-1).float()
        angles = FluxPosEmbed(10000, list(axes))(ids)
        torch.testing.assert_close(found[1 + index], apply_rotary_emb(heads[None], angles)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(at_positions(heads, (), random), heads[None])


def test_other_norms_than_those_of_the_published_models_are_left_alone():
    network = transformer(True)
    assert len(FAMILY.attentions(network)) == 3
    network.register_to_config(qk_norm="layer_norm")
    assert FAMILY.attentions(network) == {}
