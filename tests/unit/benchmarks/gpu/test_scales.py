"""Assignments that were kept compute what those that were derived do."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import scales, sides
from benchmarks.gpu.network import inputs_of
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.commit


@pytest.fixture(scope="module")
def kept(unet, assignments, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "scales.safetensors"
    scales.save(path, assignments.found, sides.RECIPES, unet.inner)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", sides.RECIPES)
@torch.no_grad()
def test_what_was_kept_computes_what_was_derived(unet, assignments, kept, name):
    found = scales.load(kept, name, sides.RECIPES[name], unet.inner)
    assert found is not None and found.keys() == assignments[name].keys()
    for layer, derived in assignments[name].items():
        assert (found[layer].format, found[layer].activation_amax) == (derived.format, derived.activation_amax)
        assert found[layer].activation_zero_point == derived.activation_zero_point
        if derived.weight_amax is not None:
            torch.testing.assert_close(found[layer].weight_amax, derived.weight_amax, rtol=2e-3, atol=0)
    inputs, side = inputs_of(unet, 1, 64), sides.Side("", name, products="simulated")
    full = unet.module(**inputs)
    errors = [
        relative_error(full, sides.network_of(unet, side, {name: rows})(**inputs))
        for rows in (found, assignments[name])
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_scales_of_another_recipe_are_not_taken(unet, kept):
    name = "int8 level 3"
    assert scales.load(kept, name, replace(sides.RECIPES[name], alpha=0.5), unet.inner) is None
    assert scales.load(kept, "of another name", sides.RECIPES[name], unet.inner) is None


def test_scales_of_another_network_are_not_taken(transformer, kept):
    name = "fp8 level 3"
    assert scales.load(kept, name, sides.RECIPES[name], transformer.inner) is None
