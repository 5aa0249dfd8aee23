"""Every side computes the network, and differs from it by what its recipe costs."""

import pytest
import torch

from benchmarks.gpu import sides
from benchmarks.gpu.network import inputs_of
from sd_quant.numbers import relative_error
from sd_quant.simulation.native import NativeLayer, NativeLinear, RoundedConv

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
    plain = sides.Side("", side.recipe, products="simulated", text=side.text)
    recipe = relative_error(full, sides.network_of(network, plain, assignments)(**inputs))
    assert 1e-3 < recipe < 0.2 and relative_error(full, found) == pytest.approx(recipe, rel=0.25)


def codes_of(unet, side: str, assignments) -> set[str]:
    network = sides.network_of(unet, sides.SIDES[side], assignments)
    return {name for name, module in network.unet.named_modules() if isinstance(module, NativeLayer | RoundedConv)}


@torch.no_grad()
def test_sides_differ_in_what_they_say(unet, assignments):
    usual = codes_of(unet, "int8 level 3", assignments)
    text = {name for name in usual if name.endswith(sides.TEXT)}
    assert text and codes_of(unet, "int8 level 3, text in fp16", assignments) == usual - text
    joined = codes_of(unet, "int8 level 3, joined projections", assignments)
    assert not any(name.endswith(("to_k", "to_v")) for name in joined) and len(joined) < len(usual)
    rounded = sides.network_of(unet, sides.SIDES["int8 level 3, convolutions rounded"], assignments)
    kinds = {type(module) for module in rounded.unet.modules() if isinstance(module, NativeLayer | RoundedConv)}
    assert kinds == {NativeLinear, RoundedConv}
