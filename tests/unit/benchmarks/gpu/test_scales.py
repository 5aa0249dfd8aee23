"""Assignments that were kept compute what those that were derived do."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import scales, sides
from sd_quant.numbers import relative_error


@pytest.fixture(scope="module")
def kept(part, assignments, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "scales.safetensors"
    scales.save(path, assignments.found, sides.RECIPES, part.unet)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", sides.RECIPES)
@torch.no_grad()
def test_what_was_kept_computes_what_was_derived(part, assignments, kept, name):
    found = scales.load(kept, name, sides.RECIPES[name], part.unet)
    assert found is not None and found.keys() == assignments[name].keys()
    for layer, derived in assignments[name].items():
        assert (found[layer].format, found[layer].activation_amax) == (derived.format, derived.activation_amax)
        assert found[layer].activation_zero_point == derived.activation_zero_point
        if derived.weight_amax is not None:
            torch.testing.assert_close(found[layer].weight_amax, derived.weight_amax, rtol=2e-3, atol=0)
    inputs, side = sides.inputs_of(part, 1, 64), sides.Side("", name, products="simulated")
    full = part(**inputs)
    errors = [
        relative_error(full, sides.network_of(part, side, {name: rows})(**inputs))
        for rows in (found, assignments[name])
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_scales_of_another_recipe_are_not_taken(part, kept):
    name = "int8 level 3"
    assert scales.load(kept, name, replace(sides.RECIPES[name], alpha=0.5), part.unet) is None
    assert scales.load(kept, "of another name", sides.RECIPES[name], part.unet) is None
