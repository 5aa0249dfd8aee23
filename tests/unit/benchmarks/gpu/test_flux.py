"""FLUX in the table: its real size on the meta device, all else with a small one."""

import argparse
import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import flux, scales, sides, worker
from benchmarks.gpu.network import inputs_of, statistics_of, twin
from sd_quant.devices import CPU
from sd_quant.models.parts import axes
from sd_quant.numbers import relative_error
from sd_quant.quantization.derivation import derive
from sd_quant.simulation.native import NativeLayer

pytestmark = pytest.mark.commit


@pytest.mark.slow
def test_it_is_as_large_as_dev():
    transformer = flux.structure(flux.DEV)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == 11_901_408_320
    assert (len(transformer.transformer_blocks), len(transformer.single_transformer_blocks)) == (19, 38)
    roles = flux.family.layer_roles(transformer)
    quantized = [name for name, role in roles.items() if role != "excluded"]
    assert len(quantized) == 19 * 12 + 38 * 5 and len(roles) - len(quantized) == 86


@torch.no_grad()
def test_a_call_is_that_of_a_picture_of_1024_pixels(transformer):
    shapes = transformer.part.contract.shapes(**axes(transformer.samples, 1024, 1024))
    assert shapes["hidden_states"][:2] == (1, 4096) and shapes["encoder_hidden_states"][:2] == (1, 512)
    assert "guidance" in shapes and flux.known(1024).keys() < shapes.keys()
    assert {name: tuple(tensor.shape) for name, tensor in flux.known(1024).items()}.items() <= shapes.items()
    places = flux.known(1024)["img_ids"]
    assert places[65].tolist() == [0, 1, 1] and places[-1].tolist() == [0, 63, 63]
    one, two = (inputs_of(transformer, pictures, 64) for pictures in (1, 2))  # at the same places
    assert len(two["hidden_states"]) == len(two["guidance"]) == 2 and torch.equal(one["img_ids"], two["img_ids"])
    half = flux.build(flux.SMALL, CPU, torch.bfloat16).module  # its weights are those of bf16, whatever the dtype
    for found, expected in zip(half.parameters(), transformer.module.parameters(), strict=True):
        assert found.dtype == torch.bfloat16 and torch.equal(found.float(), expected)
    other = twin(transformer.module)  # has the same tensors, and modules of its own
    assert all(a is b for a, b in zip(other.parameters(), transformer.module.parameters(), strict=True))
    assert not set(other.modules()) & set(transformer.module.modules())


@torch.no_grad()
def test_the_layers_of_its_roles_are_of_codes(networks):
    """And no others. What they make of the output is not lost behind closed gates."""
    network, assignments = networks["flux"]
    side = sides.network_of(network, sides.SIDES["flux fp8 level 3"], assignments)
    inner = side.get_submodule("transformer")
    codes = {name for name, module in inner.named_modules() if isinstance(module, NativeLayer)}
    roles = flux.family.layer_roles(network.inner)
    assert codes == {name for name, role in roles.items() if role != "excluded"}
    assert {"single_transformer_blocks.0.proj_out", "transformer_blocks.1.attn.add_k_proj"} <= codes
    inputs = inputs_of(network, 1, 64)
    assert relative_error(network.module(**inputs), side(**inputs)) > 0.01


@torch.no_grad()
def test_its_ranges_are_those_that_are_derived(networks):
    network, assignments = networks["flux"]
    inner, roles = network.inner, flux.family.layer_roles(network.inner)
    statistics = statistics_of(network, inputs_of(network, 1, 64)).layers
    recipe, rows = sides.RECIPES["fp8 level 3"], assignments["fp8 level 3"]
    weight_of = lambda name: inner.get_parameter(f"{name}.weight")  # noqa: E731
    derived = derive(roles, weight_of, statistics, recipe, flux.family.shared_inputs(roles))
    assert rows.keys() == derived.keys()
    for name, expected in derived.items():
        found = rows[name]
        if expected.weight_amax is not None:
            torch.testing.assert_close(found.weight_amax, expected.weight_amax, rtol=0, atol=0)
        errors = dict.fromkeys(("weight_amax", "output_error"))
        assert replace(found, **errors) == replace(expected, **errors)
    with pytest.raises(AssertionError, match="smoothing='folded'"):
        assignments["int8 level 3"]  # which asks for more


@pytest.mark.slow
def test_rows_are_made_and_one_network_is_kept_at_a_time():
    small = Path(__file__).parents[4] / "examples/sdxl_mini/model_config.yaml"
    chosen = argparse.Namespace(size=64, steps=2, repeats=3, model=small, scales=None, no_compile=True)
    bench = worker.one_at_a_time(partial(worker.Bench, chosen))
    for side in [side for side in sides.SIDES if side.startswith("flux ")]:
        row = worker.answer(bench, {"kind": "row", "side": side, "batch": 1, "told": True})
        assert row["network"] == "flux" and row["p50_ms"] > 0 and not row.get("doubts")
        assert row["about"]["operations of flux"] == bench("flux").operations > 0
        assert ("error" in row) == (sides.SIDES[side].recipe is not None) == bool(row["about"]["derived of flux"])
        assert "loop_ms" not in row  # of guidance that is two samples
    assert bench("flux").compiled
    kept = weakref.ref(bench("flux").network.module)
    second = bench("sdxl")
    gc.collect()
    assert kept() is None and second.name == "sdxl"


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
