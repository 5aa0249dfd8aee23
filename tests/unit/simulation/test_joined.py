"""Joined projections against the three that they replace, by products of codes and by ModelOpt's quantizers."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.models.unet import shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.simulation.joined import alike, join_projections, joined
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import NativeLinear, with_native_layers


def assignment_of(calibrated, fmt: str) -> dict[str, LayerAssignment]:
    pair = Pair(fmt, fmt)
    recipe = Recipe(3.0, 0.8, collect_method="min-max", enable=Enable(pair, pair, None), per_channel=fmt == "int8")
    unet = calibrated.part().unet
    return derive(
        calibrated.roles, lambda name: unet.get_submodule(name).weight, calibrated.statistics.layers, recipe,
        shared_inputs(calibrated.roles),
    )  # fmt: skip


def computed(calibrated, unet: nn.Module) -> torch.Tensor:
    part = calibrated.part()
    part.unet = unet
    return part(**calibrated.calls[0])


@torch.no_grad()
def test_int8_with_scales_per_row_computes_the_same(calibrated):
    assignment = assignment_of(calibrated, "int8")
    assert any(row.output_scale is not None for name, row in assignment.items() if name.endswith("to_v"))
    unet = copy.deepcopy(calibrated.part().unet)
    rows = join_projections(unet, assignment)
    joined = with_native_layers(unet, rows)
    names = {name for name, module in joined.named_modules() if isinstance(module, NativeLinear)}
    attentions = {name.removesuffix(".to_q") for name in assignment if name.endswith(".to_q")}
    expected = {f"{name}.to_{'kv' if name.endswith('2') else 'qkv'}" for name in attentions}
    assert {name for name in names if name.endswith("kv")} == expected
    assert not any(name.endswith(("to_k", "to_v")) for name in rows)
    separate = with_native_layers(copy.deepcopy(calibrated.part().unet), assignment)
    torch.testing.assert_close(computed(calibrated, joined), computed(calibrated, separate), rtol=0, atol=1e-5)


@torch.no_grad()
def test_fp8_with_one_scale_has_that_of_the_largest_weight_and_costs_little(calibrated):
    assignment, full = assignment_of(calibrated, "fp8"), computed(calibrated, calibrated.part().unet)
    unet = copy.deepcopy(calibrated.part().unet)
    rows = join_projections(unet, assignment)
    name = next(name for name in rows if name.endswith("attn1.to_qkv"))
    apart = [assignment[name.replace("to_qkv", part)].weight_amax for part in ("to_q", "to_k", "to_v")]
    assert rows[name].weight_amax == max(apart) and rows[name].weight_shape[0] == 3 * rows[name].weight_shape[1]
    joined = relative_error(full, computed(calibrated, with_native_layers(copy.deepcopy(unet), rows)))
    simulated = relative_error(full, computed(calibrated, simulate(unet, rows)))
    separate = with_native_layers(copy.deepcopy(calibrated.part().unet), assignment)
    assert joined < 1.2 * simulated and joined < 1.2 * relative_error(full, computed(calibrated, separate))


ROW = LayerAssignment("a", "attention", (4, 4), "int8", "int8", weight_axis=0, weight_amax=torch.ones(4),
                      activation_amax=1.0)  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        None,
        replace(ROW, format=None),
        replace(ROW, format="fp8"),
        replace(ROW, activation_amax=2.0),
        replace(ROW, weight_axis=None),
        replace(ROW, pre_quant_scale=torch.ones(4)),
        replace(ROW, low_rank=(torch.ones(4, 1), torch.ones(1, 4))),
    ],
)
def test_what_is_not_quantized_alike_stays_apart(other):
    assert alike([ROW, ROW]) and not alike([ROW, other])


def test_what_one_of_them_has_absorbed_stands_beside_nothing_of_the_others():
    absorbing = replace(ROW, output_scale=torch.full((4,), 2.0), output_shift=torch.full((4,), 3.0))
    row = joined("both", [ROW, absorbing])
    assert row.output_scale.tolist() == [1] * 4 + [2] * 4 and row.output_shift.tolist() == [0] * 4 + [3] * 4
    assert joined("both", [ROW, ROW]).output_shift is None
