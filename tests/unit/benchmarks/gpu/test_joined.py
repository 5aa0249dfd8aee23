"""Joined projections against the three that they replace, by products of codes and by ModelOpt's quantizers."""

import copy
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.joined import alike, join_projections, joined
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import NativeLinear, PerTokenLinear, with_native_layers

pytestmark = pytest.mark.commit


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"per_token": True, "rotation": 16}], ids=["static", "per token"])
@torch.no_grad()
def test_int8_with_scales_per_row_computes_the_same(calibrated, given):
    assignment, unet = calibrated.in_format("int8", **given), calibrated.part().unet
    assert any(row.output_scale is not None for name, row in assignment.items() if name.endswith("to_v"))
    rows = join_projections(unet, assignment)
    attentions = {name.removesuffix(".to_q") for name in assignment if name.endswith(".to_q")}
    expected = {f"{name}.to_{'kv' if name.endswith('2') else 'qkv'}" for name in attentions}
    assert {name for name in rows if name.endswith("kv")} == expected
    assert not any(name.endswith(("to_k", "to_v")) for name in rows)
    joined = with_native_layers(unet, rows)
    for name in expected:
        assert isinstance(joined.get_submodule(name), PerTokenLinear if given else NativeLinear)
        assert not given or (rows[name].per_token, rows[name].rotation, rows[name].activation_amax) == (True, 16, 1.0)
    separate = with_native_layers(calibrated.part().unet, assignment)
    torch.testing.assert_close(calibrated.output(joined), calibrated.output(separate), rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_fp8_with_one_scale_has_that_of_the_largest_weight_and_costs_little(calibrated):
    assignment, unet = calibrated.in_format("fp8"), calibrated.part().unet
    full = calibrated.output(unet)
    rows = join_projections(unet, assignment)
    name = next(name for name in rows if name.endswith("attn1.to_qkv"))
    apart = [assignment[name.replace("to_qkv", part)].weight_amax for part in ("to_q", "to_k", "to_v")]
    assert rows[name].weight_amax == max(apart) and rows[name].weight_shape[0] == 3 * rows[name].weight_shape[1]
    joined = relative_error(full, calibrated.output(with_native_layers(copy.deepcopy(unet), rows)))
    simulated = relative_error(full, calibrated.output(simulate(unet, rows)))
    separate = with_native_layers(calibrated.part().unet, assignment)
    assert joined < 1.2 * simulated and joined < 1.2 * relative_error(full, calibrated.output(separate))


ROW = LayerAssignment("a", "attention", (4, 4), "int8", "int8", weight_axis=0, weight_amax=torch.ones(4),
                      activation_amax=1.0)  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"format": None},
        {"format": "fp8"},
        {"activation_amax": 2.0},
        {"weight_axis": None},
        {"pre_quant_scale": torch.ones(4)},
        {"low_rank": (torch.ones(4, 1), torch.ones(1, 4))},
        {"per_token": True},
        {"rotation": 4},
    ],
)
def test_what_is_not_quantized_alike_stays_apart(other):
    assert alike([ROW, ROW]) and not alike([ROW, replace(ROW, **other)]) and not alike([ROW, None])


def test_what_one_of_them_has_absorbed_stands_beside_nothing_of_the_others():
    absorbing = replace(ROW, output_scale=torch.full((4,), 2.0), output_shift=torch.full((4,), 3.0))
    row = joined("both", [ROW, absorbing])
    assert row.output_scale.tolist() == [1] * 4 + [2] * 4 and row.output_shift.tolist() == [0] * 4 + [3] * 4
    assert joined("both", [ROW, ROW]).output_shift is None
