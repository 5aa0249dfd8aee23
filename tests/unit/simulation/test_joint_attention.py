"""The simulation's processor of joint attention against diffusers' own, whose two products it replaces."""

import pytest
import torch
from torch import Tensor, nn

from sd_quant.numbers import relative_error
from sd_quant.simulation.rewrite import QuantizedJointAttention

from ...joint_attention import calibrated


class Exact(nn.Module):
    """What the products are when nothing is rounded."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(2, 3)).softmax(-1) @ value


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@torch.no_grad()
def test_it_is_diffusers_own_but_for_what_is_rounded(normed, fmt):
    """In both streams: each attention alone, with its text and, where it is the image's own, without."""
    joint = calibrated("sd35" if normed else "sd3")
    network, rows = joint.part().transformer, joint.rows(fmt)
    image, text = torch.randn(2, 16, 64), torch.randn(2, 20, 64)
    for name in (name for name, row in rows.items() if row.attention_products):
        attention = network.get_submodule(name)
        given = {} if name.endswith("attn2") else {"encoder_hidden_states": text}
        expected = attention(image, **given)
        attention.set_processor(QuantizedJointAttention(rows[name]))
        rounded = attention(image, **given)
        attention.processor.products = Exact()
        exact = attention(image, **given)
        streams = [(expected, rounded, exact)] if not given else zip(expected, rounded, exact, strict=True)
        for theirs, codes, ours in streams:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert 2e-3 < relative_error(theirs, codes) < 0.1, name
