"""The simulation's attentions against diffusers' own, whose two products they replace; and absorbed factors."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.rewrite import FloatProducts, rewrite

from ...joint_attention import MADE, Joint, calibrated

pytestmark = pytest.mark.commit


class Exact(nn.Module):
    """What the products are when nothing is rounded."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *mask, scale=1.0)


def calls_of(joint: Joint, names: list[str]) -> dict[str, tuple[tuple, dict, Tensor | tuple[Tensor, ...]]]:
    """What these attentions of the network are given in one call, and what they return."""
    part, found = joint.part(), {}
    for name in names:
        part.transformer.get_submodule(name).register_forward_hook(
            lambda _, given, named, output, name=name: found.update({name: (given, named, output)}), with_kwargs=True
        )
    part(**joint.inputs(seed=7))
    return found


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@torch.no_grad()
def test_it_is_diffusers_own_but_for_what_is_rounded(name, fmt):
    """In both streams: each attention alone, with the text, positions and mask that the network gives it."""
    joint = calibrated(name)
    rows = {each: row for each, row in joint.rows(fmt).items() if row.role == "attention"}
    quantized = [each for each, row in rows.items() if row.attention_products]
    network = joint.part().transformer
    rewrite(network, rows)
    assert len(quantized) == (2 if (name, fmt) == ("pixart", "int8") else len(rows))
    for attention, (given, named, expected) in calls_of(joint, quantized).items():
        module = network.get_submodule(attention)
        rounded = module(*given, **named)
        module.processor.products = Exact()
        exact = module(*given, **named)
        streams = [(expected, rounded, exact)]
        for theirs, codes, ours in streams if torch.is_tensor(expected) else zip(*streams[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert 5e-4 < relative_error(theirs, codes) < 0.1, attention


@torch.no_grad()
def test_products_in_floats_are_torchs_own_attention_and_its_mask_widens_nothing():
    """E4M3 has a relative error of 2^-4 at most, and 0.05 was measured; a masked score of -10000 has no part in it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 32) for _ in "qkv")
    mask = torch.zeros(2, 3, 1, 40)
    mask[..., 25:] = -10000.0
    root = 32**-0.25
    ranges = tuple(each.abs().amax().view(1) for each in (root * query, root * key, value))
    row = LayerAssignment("attn", "attention", (32,), activation_format="fp8", attention_amax=ranges)
    products = FloatProducts(row)
    for given in ((), (mask,)):
        expected = F.scaled_dot_product_attention(query, key, value, *given)
        assert relative_error(expected, products(root * query, root * key, value, *given)) < 0.06
    cut = products(root * query, root * key[..., :25, :], value[..., :25, :])
    torch.testing.assert_close(products(root * query, root * key, value, mask), cut)


BLOCK, SINGLE = "transformer_blocks.0", "single_transformer_blocks.0"
FOLDED = {  # by network: readers of a block, and what their input's modulation is
    "sd3": {
        f"{BLOCK}.attn.to_q": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.attn.add_k_proj": f"{BLOCK}.norm1_context.linear",
        f"{BLOCK}.ff.net.0.proj": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.ff_context.net.0.proj": f"{BLOCK}.norm1_context.linear",
        "transformer_blocks.1.attn.add_q_proj": "transformer_blocks.1.norm1_context.linear",  # scale, then shift
    },
    "sd35": {f"{BLOCK}.attn2.{layer}": f"{BLOCK}.norm1.linear" for layer in ("to_q", "to_k", "to_v")},
    "flux": {
        f"{BLOCK}.attn.to_v": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.ff_context.net.0.proj": f"{BLOCK}.norm1_context.linear",
        f"{SINGLE}.attn.to_q": f"{SINGLE}.norm.linear",
        f"{SINGLE}.proj_mlp": f"{SINGLE}.norm.linear",
    },
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_network_whose_modulations_have_absorbed_factors_computes_the_same(name):
    """The readers' weights are divided, and nothing is rounded."""
    joint = calibrated(name, modulated=True)
    assignment = joint.derived(Recipe(3.0, 0.5, collect_method="min-max", per_channel=True))
    found = {reader: assignment[reader].folded_into for reader in FOLDED[name]}
    assert found == FOLDED[name]
    readers = [layer for layer in assignment.values() if ".norm" in (layer.folded_into or "")]
    assert all(layer.pre_quant_scale.max() > 2 * layer.pre_quant_scale.min() for layer in readers)
    plain, changed = joint.part(), joint.part()  # without the factors for which the graph has to multiply
    rewrite(
        changed.transformer,
        {row.name: replace(row, pre_quant_scale=None) if row.multiplies else row for row in assignment.values()},
    )
    for reader, producer in FOLDED[name].items():
        for layer in (reader, producer):
            weights = (part.transformer.get_submodule(layer).weight for part in (plain, changed))
            assert relative_error(*weights) > 0.05
    inputs = joint.inputs(seed=7)
    assert relative_error(plain(**inputs), changed(**inputs)) < 1e-5  # measured 1e-6
