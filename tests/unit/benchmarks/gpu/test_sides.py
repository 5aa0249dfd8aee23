"""Every side computes the network, and differs from it by what its recipe costs."""

import pytest
import torch

from benchmarks.gpu import sides
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
