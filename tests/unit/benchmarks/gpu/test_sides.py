"""Every side differs from the network by what its recipe costs, and assignments that were kept do as derived ones."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import scales, sides
from benchmarks.gpu.network import inputs_of
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.commit

HERE = [side for side in sides.SIDES.values() if side.products != "the kernel's"]  # that runs on a GPU alone


@pytest.mark.slow
@pytest.mark.parametrize("side", HERE, ids=lambda side: side.name)
@torch.no_grad()
def test_it_costs_what_its_recipe_costs(networks, side):
    network, assignments = networks[side.network]
    inputs = inputs_of(network, 1, 64)
    full, found = network.module(**inputs), sides.network_of(network, side, assignments)(**inputs)
    if side.recipe is None:
        assert relative_error(full, found) < 1e-5
        return
    plain = sides.Side("", side.recipe, products="simulated")
    recipe = relative_error(full, sides.network_of(network, plain, assignments)(**inputs))
    assert 1e-3 < recipe < 0.2 and relative_error(full, found) == pytest.approx(recipe, rel=0.25)


@pytest.mark.slow
@torch.no_grad()
def test_kept_scales_compute_what_was_derived_and_those_of_another_recipe_or_network_are_not_taken(
    unet, transformer, assignments, tmp_path
):
    path = tmp_path / "scales.safetensors"
    scales.save(path, assignments.found, sides.RECIPES, unet.inner)
    inputs = inputs_of(unet, 1, 64)
    full = unet.module(**inputs)
    for name, recipe in sides.RECIPES.items():
        found = scales.load(path, name, recipe, unet.inner)
        assert found.keys() == assignments[name].keys()
        for layer, derived in assignments[name].items():
            facts = ("format", "activation_amax", "activation_zero_point")
            assert [getattr(found[layer], fact) for fact in facts] == [getattr(derived, fact) for fact in facts]
            if derived.weight_amax is not None:
                torch.testing.assert_close(found[layer].weight_amax, derived.weight_amax, rtol=2e-3, atol=0)
        side = sides.Side("", name, products="simulated")
        kept, own = (
            relative_error(full, sides.network_of(unet, side, {name: rows})(**inputs))
            for rows in (found, assignments[name])
        )
        assert kept == pytest.approx(own, rel=0.1)
    assert scales.load(path, name, replace(recipe, alpha=0.5), unet.inner) is None
    assert scales.load(path, "of another name", recipe, unet.inner) is None
    assert scales.load(path, "fp8 level 3", sides.RECIPES["fp8 level 3"], transformer.inner) is None
