"""The ranges of a joint attention against what diffusers' own processor multiplies."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.models.sd3 import FAMILY
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import FLOAT_HEADROOM, INTEGER_HEADROOM

from ...joint_attention import CALLS, Joint, calibrated, transformer

NAMES = {
    True: ["transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"],
    False: ["transformer_blocks.0.attn", "transformer_blocks.1.attn"],
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
    names = list(FAMILY.attentions(joint.network))
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


@pytest.mark.parametrize("normed", NAMES, ids=["normed", "plain"])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_ranges_are_of_both_streams_as_they_are_multiplied(fmt, normed, monkeypatch):
    """Biases and norms included. The sample has every token, if in fp16."""
    joint = calibrated("sd35" if normed else "sd3")
    rows = joint.rows(fmt)
    assert [name for name, row in rows.items() if row.attention_products] == NAMES[normed]
    for name, (query, key, value) in multiplied(joint, rows, monkeypatch).items():
        if fmt == "int8":
            torch.testing.assert_close(rows[name].key_mean, key.mean(1), rtol=2e-2, atol=2e-3)
            key = key - key.mean(1, keepdim=True)
            largest = [heads.abs().amax((1, 2)) for heads in (query, key, value, query @ key.transpose(1, 2))]
        else:
            largest = [heads.abs().amax().view(1) for heads in (query, key, value)]
        headroom = INTEGER_HEADROOM if fmt == "int8" else FLOAT_HEADROOM
        for amax, expected in zip(rows[name].attention_amax, largest, strict=True):
            torch.testing.assert_close(amax, headroom * expected, rtol=1e-2, atol=0)


def test_other_norms_than_those_of_the_published_models_are_left_alone():
    network = transformer(True)
    assert len(FAMILY.attentions(network)) == 3
    network.register_to_config(qk_norm="layer_norm")
    assert FAMILY.attentions(network) == {}
