"""Factors that modulations absorb change nothing: the readers' weights are divided, and nothing is rounded."""

from dataclasses import replace

import pytest

from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.rewrite import rewrite

from ...joint_attention import calibrated

pytestmark = pytest.mark.commit

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
