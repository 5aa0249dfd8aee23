"""The ranges of a joint attention against what diffusers' own processor multiplies."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.sd3 import attentions
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import FLOAT_HEADROOM, INTEGER_HEADROOM

from ...joint_attention import CALLS, Joint, calibrated, transformer

NAMES = {
    True: ["transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"],
    False: ["transformer_blocks.0.attn", "transformer_blocks.1.attn"],
}


@pytest.fixture(params=[True, False], ids=["normed", "plain"])
def normed(request) -> bool:
    return request.param


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
    names = list(attentions(joint.network))
    found = {
        name: [torch.cat(calls, 1) for calls in zip(*seen[index :: len(names)], strict=True)]
        for index, name in enumerate(names)
    }
    for name, heads in found.items():
        scale = rows[f"{name}.to_v"].output_scale
        assert (scale is not None) == name.endswith("attn2")  # no scale is absorbed where two linears make the value
        if scale is not None:
            heads[2] = heads[2] * scale.view(len(heads[2]), 1, -1)
    return found


def test_both_kinds_of_attention_are_quantized(normed):
    for fmt in ("int8", "fp8"):
        rows = calibrated(normed).rows(fmt)
        assert [name for name, row in rows.items() if row.attention_products] == NAMES[normed]


def test_integer_ranges_are_of_both_streams_as_they_are_multiplied(normed, monkeypatch):
    """Biases and norms included. The sample has every token, if in fp16."""
    joint = calibrated(normed)
    rows = joint.rows("int8")
    for name, (query, key, value) in multiplied(joint, rows, monkeypatch).items():
        torch.testing.assert_close(rows[name].key_mean, key.mean(1), rtol=2e-2, atol=2e-3)
        key = key - key.mean(1, keepdim=True)
        expected = [heads.abs().amax((1, 2)) for heads in (query, key, value, query @ key.transpose(1, 2))]
        for amax, largest in zip(rows[name].attention_amax, expected, strict=True):
            torch.testing.assert_close(amax, INTEGER_HEADROOM * largest, rtol=1e-2, atol=0)


def test_float_ranges_are_of_both_streams_as_they_are_multiplied(normed, monkeypatch):
    joint = calibrated(normed)
    rows = joint.rows("fp8")
    for name, heads in multiplied(joint, rows, monkeypatch).items():
        for amax, each in zip(rows[name].attention_amax, heads, strict=True):
            torch.testing.assert_close(amax, FLOAT_HEADROOM * each.abs().amax().view(1), rtol=1e-2, atol=0)


@torch.no_grad()
def test_a_first_token_that_is_far_larger_is_as_large_as_the_others_behind_the_norm():
    """So that integers may quantize a joint attention and not a cross-attention."""
    joint, sizes = calibrated(True), []
    network = joint.part().transformer
    for block in network.transformer_blocks:
        block.attn.add_k_proj.register_forward_pre_hook(lambda _, given: sizes.append(given[0].norm(dim=-1)))
    inputs = joint.inputs(0)
    inputs["encoder_hidden_states"][:, 0] *= 80
    network(*inputs.values())
    assert len(sizes) == 2
    for size in sizes:
        assert (size[:, 0] < 1.5 * size[:, 1:].mean(1)).all()


def test_other_norms_than_those_of_the_published_models_are_left_alone():
    network = transformer(True)
    assert len(attentions(network)) == 3
    network.register_to_config(qk_norm="layer_norm")
    assert attentions(network) == {}
