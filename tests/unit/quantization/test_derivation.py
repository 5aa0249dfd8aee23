import csv
import io
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization import convolutions, linears, row_chunks
from sd_quant.quantization.assignment import FIXED_ALPHA, LayerAssignment, rewritten
from sd_quant.quantization.budget import with_weights
from sd_quant.quantization.convolutions import SHIFT_PAYS, assign_convolution, shifted_range, with_shifted_bias
from sd_quant.quantization.derivation import derive, derive_nearest
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.linears import ALPHAS, Readers, absorb_scale, assign_linears
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.ranges import InputRange, observed_range, with_ranges
from sd_quant.quantization.recipe import BY_ROLE, Enable, Pair, Recipe, excluded
from sd_quant.quantization.row_chunks import layer_of_rows, output_error
from sd_quant.quantization.smoothing import awake, pre_quant_scale, range_keeping_scale
from sd_quant.quantization.statistics import LayerStatistics
from tests.layers import drawn, sample_of
from tests.presets import recipe_of

pytestmark = pytest.mark.commit

# A block as in SDXL, two channels wide: to_q and to_k read a norm, ``up`` reads a residual stream, ``down`` reads the
# first half of what ``up`` makes. The other half is the gate.
KEPT = "among the most sensitive layers"
STEPS = 20  # of denoising
ROLES = {"conv_in": "excluded", "conv": "conv", "to_q": "qkv", "to_k": "qkv", "up": "ffn", "down": "ffn"}
INPUTS = [SharedInput(("to_q", "to_k"), "norm"), SharedInput(("up",)), SharedInput(("down",), "up")]
WEIGHTS = {
    "conv_in": torch.ones(2, 4, 3, 3),
    "conv": torch.tensor([2.54, -5.08]).view(2, 1, 1, 1).expand(2, 3, 3, 3),
    "norm": torch.tensor([3.0, 5.0]),
    "to_q": torch.tensor([[127.0, 0.0], [-127.0, 8.0]]),
    "to_k": torch.tensor([[1.0, 508.0], [2.0, 4.0]]),
    "up": torch.tensor([[127.0, 1.0], [0.0, 127.0], [-127.0, 0.0], [3.0, -254.0]]),
    "down": torch.tensor([[127.0, 0.0], [-127.0, 508.0]]),
}


def seen(kind: str, amax: list, rows: Tensor | None = None) -> LayerStatistics:
    """``amax`` [prompts, steps] of a conv, [steps, in_features] of a linear; no rows unless given."""
    rows = torch.empty(0, 27 if kind == "conv" else 2) if rows is None else rows
    return LayerStatistics(kind, torch.tensor(amax), sample_of(rows.half()))


STATISTICS = {
    "conv": seen("conv", [[254.0, 127.0], [381.0, 254.0]]),
    "to_q": seen("linear", [[127.0, 1.0], [1.0, 2032.0]]),
    "to_k": seen("linear", [[127.0, 1.0], [1.0, 2032.0]]),
    "up": seen("linear", [[127.0, 254.0]]),
    "down": seen("linear", [[127.0, 1.0], [1.0, 2032.0]]),
}


def assign(
    quant_level: float = 2.5, *, weights=(), statistics=(), kept=(), exclude=(), **recipe
) -> dict[str, LayerAssignment]:
    """The block with alpha 0.5, what is given changed; a layer of which None was seen was never reached."""
    recipe = Recipe(quant_level, **({"alpha": 0.5, "collect_method": "min-max"} | recipe))
    reached = {name: found for name, found in (STATISTICS | dict(statistics)).items() if found is not None}
    exceptions = dict.fromkeys(kept, KEPT) | excluded(ROLES, exclude)
    return derive(ROLES, (WEIGHTS | dict(weights)).__getitem__, reached, recipe, INPUTS, exceptions)


def test_percentile_and_collect_method_are_for_convolutions_alone():
    assert assign()["conv"].activation_amax == 254.0  # over prompts max (381, 254), over steps min
    # percentile and collect_method: in the first half of the steps 254 and 381; two of a call make one range
    for calibrator, method, share, expected in (("corrected", "min-max", 0.5, 381.0), ("modelopt", "min-mean", 1, 127)):
        rows = assign(percentile_calibrator=calibrator, collect_method=method, percentile=share, batch_size=2)
        assert rows["conv"].activation_amax == expected and rows["to_q"].activation_amax == 1016.0


def test_a_weight_is_read_once():
    """A second time would be 5 GB more of the full-size UNet. Without folding, because that reads producers again."""
    read = []
    rows = derive(
        ROLES, lambda name: read.append(name) or WEIGHTS[name], STATISTICS,
        Recipe(2.5, 0.5, collect_method="min-max", smoothing="modelopt"), INPUTS,
    )  # fmt: skip
    assert sorted(read) == sorted(ROLES)
    assert {name: row.weight_shape for name, row in rows.items()} == {n: tuple(WEIGHTS[n].shape) for n in ROLES}


def test_a_quantized_linear_that_takes_over_has_other_ranges_in_the_half_that_is_read():
    """``up``: a = (127, 254), w = (127, 254), so its own vector is (1, 1); ``down`` has (1, 0.5), of two channels.

    Two readers share the vector that goes into their norm, (sqrt(127 / 127), sqrt(508 / 2032)).
    """
    rows = assign()
    assert rows["to_q"].pre_quant_scale is rows["to_k"].pre_quant_scale and rows["to_k"].folded_into == "norm"
    assert rows["norm"].output_scale.tolist() == rows["to_q"].pre_quant_scale.tolist() == [1.0, 0.5]
    assert rewritten(WEIGHTS["norm"], rows["norm"]).tolist() == [3.0, 2.5]  # the gain; the bias likewise
    up, down = rows["up"], rows["down"]
    assert (down.pre_quant_scale.tolist(), down.folded_into) == ([1.0, 0.5], "up")
    assert up.output_scale.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert up.weight_amax.tolist() == [127.0, 63.5, 127.0, 254.0]
    assert up.weight_scale.tolist() == [1.0, 0.5, 1.0, 2.0]
    assert (up.format, up.multiplies, up.smoothing) == ("int8", True, "multiplication")  # nothing is in front of it
    assert rewritten(WEIGHTS["up"], up).tolist() == [[127, 1], [0, 63.5], [-127, 0], [3, -254]]
    assert rewritten(torch.tensor([8.0, 8.0, 8.0, 8.0]), up).tolist() == [8, 4, 8, 8]


def test_a_linear_in_high_precision_takes_over_all_the_same_and_another_its_low_rank_branch():
    """Else the residual would have to make up for a branch of the weight as it was."""
    kept, up = assign(kept=["up"])["up"], assign(rank=1)["up"]
    assert (kept.format, kept.reason, kept.weight_amax, kept.pre_quant_scale) == (None, KEPT, None, None)
    assert kept.output_scale.tolist() == up.output_scale.tolist() == [1.0, 0.5, 1.0, 1.0]
    first, second = low_rank(WEIGHTS["up"] / up.pre_quant_scale, 1)
    torch.testing.assert_close(up.low_rank[0].float(), first.float() * up.output_scale[:, None], rtol=1e-3, atol=0)
    assert torch.equal(up.low_rank[1], second)


def test_a_vector_that_fp16_cannot_hold_in_the_norm_is_a_multiplication():
    """The second gain would be 5 * 1e4 * 2; smaller by half it fits. Nor is a weight divided in fp16."""
    almost_dead = {"to_q": seen("linear", [[127.0, 1e-8]]), "to_k": seen("linear", [[127.0, 1e-8]])}
    folded = assign(statistics=almost_dead)
    assert folded["to_q"].pre_quant_scale[1] == folded["norm"].output_scale[1] == 1e4
    rows = assign(statistics=almost_dead, weights={"norm": torch.tensor([3.0, 10.0])}, kept=["to_k"])
    assert "norm" not in rows and rows["to_q"].multiplies and rows["to_q"].folded_into is None
    assert rows["to_k"].pre_quant_scale is None  # its input is as it was
    layer = LayerAssignment("layer", "ffn", (1, 4), pre_quant_scale=torch.full((4,), 1e-4))
    found = rewritten(torch.full((1, 4), 60000.0).half(), layer)
    torch.testing.assert_close(found, torch.full((1, 4), 60000.0).half().float() * 1e4)


def test_the_preset_nemo_has_the_ranges_of_nemos_calibrator_and_the_factors_of_modelopt():
    """NeMo adds up a convolution's maxima over the calls of a step, divides by n_steps and takes the least step."""
    amax, percentile = 1 + 100 * torch.rand(32, STEPS, generator=torch.Generator().manual_seed(1)), 0.5
    recipe = recipe_of("nemo", "model=sdxl_nemo", "model.path=some.nemo", f"percentile={percentile}")
    statistics = STATISTICS | {"conv": seen("conv", amax.tolist())}
    rows = derive(ROLES, WEIGHTS.__getitem__, statistics, recipe, INPUTS)
    by_hand = min(sum(amax[:, step].tolist()) / STEPS for step in range(int(STEPS * percentile)))
    assert rows["conv"].activation_amax == pytest.approx(by_hand, rel=1e-6)
    for name in ("to_q", "to_k"):  # each by its own weight, in front of it
        factors = WEIGHTS[name].abs().amax(0) ** 0.2 / torch.tensor([127, 2032.0]) ** 0.8
        assert rows[name].pre_quant_scale == pytest.approx(factors, rel=1e-3) and rows[name].folded_into is None


def test_the_observer_sees_the_sampled_inputs_that_the_quantizer_will_see(monkeypatch):
    """A convolution's patches as they are, a linear's rows smoothed; beside them the largest value of all."""
    given = []
    half = SimpleNamespace(observe=lambda values, amax, **_: given.append((values, amax)) or amax / 2)
    monkeypatch.setitem(sys.modules, "half", half)
    monkeypatch.setitem(OBSERVERS, "half", "half:observe")
    patches, tokens = torch.full((3, 27), 5.0), torch.tensor([[2.0, 8.0], [-4.0, 16.0]])
    statistics = {
        "conv": seen("conv", [[254.0, 127.0], [381.0, 254.0]], patches),
        "to_q": seen("linear", [[127.0, 1.0], [1.0, 2032.0]], tokens),
    }
    rows = assign(statistics=statistics, observer="half")
    conv, query = given[:2]
    assert (conv[0].tolist(), conv[1]) == (patches.tolist(), 254.0)  # as the calibrator has it
    assert (query[0].tolist(), query[1]) == ([[2.0, 4.0], [-4.0, 8.0]], 1016.0)
    assert (rows["conv"].activation_amax, rows["to_q"].activation_amax) == (127.0, 508.0)


def random_input(seed: int = 0, readers: int = 2):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 24, generator=random) * torch.randn(24, generator=random).exp() * 3
    rows = rows.half().float()
    weights = {f"reader{index}": torch.randn(16, 24, generator=random) for index in range(readers)}
    amax = 1.1 * rows.abs().amax(0)  # of the whole calibration, so a little more than the sample's
    statistics = LayerStatistics("linear", amax.expand(STEPS, -1), sample_of(rows.half()))
    return weights, rows, statistics


def derive_readers(weights, statistics, alpha, **recipe) -> list[LayerAssignment]:
    roles, recipe = dict.fromkeys(weights, "ffn"), Recipe(2, alpha, **recipe)
    inputs = [SharedInput(tuple(weights))]
    return list(derive(roles, weights.get, dict.fromkeys(weights, statistics), recipe, inputs).values())


def torchs_error(layer: LayerAssignment, weight: Tensor, rows: Tensor) -> float:
    scale = torch.ones(()) if layer.pre_quant_scale is None else layer.pre_quant_scale
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    quantized = torch.fake_quantize_per_channel_affine(
        (weight / scale).flatten(1), layer.weight_scale, zeros, 0, -128, 127
    )
    fake_quantized = torch.fake_quantize_per_tensor_affine(rows * scale, layer.activation_scale, 0, -128, 127)
    return relative_error(rows @ weight.flatten(1).T, fake_quantized @ quantized.T)


def test_weights_of_another_network_take_no_statistics():
    weights = {"fc1": drawn(6, 4), "wo": drawn(4, 6), "conv": drawn(3, 2, 3, 3)}
    roles, recipe = {"fc1": "linear", "wo": "excluded", "conv": "conv"}, recipe_of("int8_weight_only")
    assert derive_nearest(roles, weights.__getitem__, {"fc1": recipe})["conv"].format is None
    found = derive_nearest(roles, weights.__getitem__, dict.fromkeys(roles, recipe))
    assert [layer.format for layer in found.values()] == ["int8", None, "int8"] and found["wo"].reason
    for name in ("fc1", "conv"):
        layer, weight = found[name], weights[name]
        assert torch.equal(layer.weight_amax, weight.flatten(1).abs().amax(1)) and layer.activation_format is None
        error = (layer.rounded_weight(weight) - weight).flatten(1).abs()
        assert (error <= 0.501 * layer.weight_scale[:, None]).all()


@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_the_output_error_is_that_of_torchs_fake_quantization(alpha):
    weights, rows, statistics = random_input()
    for layer in derive_readers(weights, statistics, alpha):
        expected = torchs_error(layer, weights[layer.name], rows)
        assert 1e-3 < expected < 0.2
        assert layer.output_error == pytest.approx(expected, rel=1e-4)
    weight, patches = drawn(8, 3, 3, 3), drawn(64, 27, seed=1).half().float()
    chosen = InputRange(patches.abs().max().item() / 2)
    layer = with_ranges(LayerAssignment("conv", "conv", (8, 3, 3, 3)), weight, chosen, Recipe(3.0, 0.8))
    assert output_error(layer, weight, patches) == pytest.approx(torchs_error(layer, weight, patches), rel=1e-4)
    assert output_error(layer, weight, patches[:0]) is output_error(layer, weight, 0 * patches) is None


def test_a_branch_reads_the_input_as_it_comes():
    """Scales are 1. The input of 200 is cut to 127 for the residual (1, 2), and the branch adds 1 * 200: 329 of 402."""
    branch = (torch.tensor([[1.0]]).half(), torch.tensor([[1.0, 0.0]]).half())
    layer = LayerAssignment("up", "ffn", (1, 2), "int8", "int8", weight_axis=0, weight_amax=torch.tensor([127.0]),
                            activation_amax=127.0, low_rank=branch)  # fmt: skip
    error = output_error(layer, torch.tensor([[2.0, 2.0]]), torch.tensor([[200.0, 1.0]]))
    assert error == pytest.approx((402 - 329) / 402)


def test_the_bias_of_each_row_is_rounded_for_itself(monkeypatch):
    """fp16 has 2048 and 4096 for these. Without a bias the output is (1, 2, 2)."""
    monkeypatch.setattr(row_chunks, "CHUNK", 1)
    layer = LayerAssignment("conv", "conv", (3, 1), "int8", weight_axis=0, weight_amax=torch.full((3,), 127.0),
                            bias=torch.tensor([0.0, 2049.0, 4098.0]))  # fmt: skip
    found = output_error(layer, torch.tensor([[1.0], [2.0], [2.0]]), torch.ones(1, 1))
    assert found == pytest.approx((1**2 + 2**2) ** 0.5 / 3)


@pytest.mark.parametrize("seed, readers", [(0, 1), (1, 3), (2, 1)])
def test_no_alpha_has_a_smaller_error_than_auto(seed, readers, monkeypatch):
    """Brute force, with torch's fake quantization as the judge. The search sees all of a layer as small as these."""
    monkeypatch.setattr(linears, "QUIET", (0.0,))  # the same factors as a fixed alpha has
    weights, rows, statistics = random_input(seed, readers)
    cost = {
        alpha: sum(
            torchs_error(layer, weights[layer.name], rows) ** 2 for layer in derive_readers(weights, statistics, alpha)
        )
        for alpha in ALPHAS
    }
    found = derive_readers(weights, statistics, "auto")
    assert {layer.alpha for layer in found} == {min(cost, key=cost.get)}
    assert sum(layer.output_error**2 for layer in found) == pytest.approx(min(cost.values()), rel=1e-3)
    assert len({round(value, 9) for value in cost.values()}) == len(ALPHAS)  # there was something to choose
    fixed = derive_readers(weights, statistics, FIXED_ALPHA)
    assert [layer.fixed_alpha_error for layer in found] == [layer.output_error for layer in fixed]
    assert found[0].row()["output_error_alpha_0.8"] == fixed[0].output_error and fixed[0].fixed_alpha_error is None


def test_auto_without_sampled_inputs_still_assigns():
    assert assign(alpha="auto")["to_q"].alpha == FIXED_ALPHA


def test_rows_are_plain_values_that_a_csv_holds():
    rows = assign()
    for name, expected in {
        "down": "down,ffn,2x2,int8,int8,,,,,0.5,folded into up,,,8.0,0,1.0,8.0,0.5,1.0",
        "norm": "norm,norm,2,high precision,,,,,takes over the smoothing of to_q,,,,,,,,,,",
    }.items():
        text = io.StringIO()
        csv.DictWriter(text, rows[name].row()).writerow(rows[name].row())
        assert text.getvalue().strip() == expected


@pytest.mark.parametrize("given, error, reason", [
    ({"statistics": {"conv": seen("conv", [[0.0]])}}, SdQuantError, "layer conv only ever saw zeros"),
    ({"statistics": {"up": seen("linear", [[0.0, 0.0]])}}, SdQuantError, "layer up only ever saw zeros"),
    ({"statistics": {"to_k": None}}, SdQuantError, "layer to_k was never reached"),
    ({"statistics": {"conv": seen("conv", [[1e7]])}}, SdQuantError, "cannot be quantized: an amax of 1e.07"),
    ({"quant_level": 1, "kept": ["conv"]}, ConfigError, "quant_level=1 with 1 layer kept leaves no layer"),
])  # fmt: skip
def test_what_cannot_be_quantized_is_refused_by_name(given, error, reason):
    with pytest.raises(error, match=reason):
        assign(**given)


INT4 = Recipe(2.5, 0.5, enable=Enable(Pair("int4", None), Pair("int4", None), None), per_channel=False)


def test_a_weight_is_worked_on_row_by_row_with_what_belongs_to_each_row(monkeypatch):
    """``up`` has a vector of its own, takes over that of ``down`` and has a low-rank branch: all of it by rows."""
    rows = torch.tensor([[127.0, 20.0], [-90.0, 254.0], [3.0, 77.0]])
    statistics = {"up": seen("linear", [[127.0, 254.0]], rows), "to_q": seen("linear", [[127.0, 254.0]], rows)}
    whole = assign(rank=1, statistics=statistics)
    monkeypatch.setattr(row_chunks, "CHUNK", 2)
    by_rows = assign(rank=1, statistics=statistics)
    for name, layer in whole.items():
        for field in fields(layer):
            found, expected = getattr(by_rows[name], field.name), getattr(layer, field.name)
            if isinstance(expected, Tensor | float | tuple):
                torch.testing.assert_close(found, expected, msg=f"{name}.{field.name}")
            else:
                assert found == expected
    assert whole["up"].output_error > 0


def test_each_layer_by_its_own_recipe_with_codes_that_err_less_where_the_recipe_chooses_them():
    rows = drawn(64, 8) @ drawn(8, 64, seed=1)
    weights = {"first": drawn(32, 64, seed=2), "second": drawn(32, 64, seed=3)}
    statistics = {name: seen("linear", [rows.abs().amax(0).tolist()], rows) for name in weights}
    inputs = [SharedInput((name,)) for name in weights]
    plain = replace(INT4, quant_level=3.0, alpha=None)
    chosen, int8 = replace(plain, rounding="gptq"), with_weights(plain, "int8")

    def found(recipe: Recipe, **recipes: Recipe) -> dict[str, LayerAssignment]:
        return derive(dict.fromkeys(weights, "ffn"), weights.__getitem__, statistics, recipe, inputs, recipes)

    nearest, gptq = found(plain), found(chosen, second=replace(int8, rounding="gptq"))
    assert nearest["first"].rounded is None and gptq["first"].rounded is not None
    assert gptq["first"].output_error < 0.8 * nearest["first"].output_error
    measured = output_error(gptq["first"], weights["first"], statistics["first"].rows.values)
    assert gptq["first"].output_error == measured
    assert (gptq["first"].format, gptq["second"].format, gptq["second"].rounded) == ("int4", "int8", None)
    assert gptq["second"].output_error < 0.2 * nearest["second"].output_error


# Smoothing by hand, two or three channels wide; against ModelOpt's on a network see simulation/test_modelopt.py


AMAX, COLUMNS = torch.tensor([4.0, 16.0, 1.0]), torch.tensor([1.0, 4.0, 9.0])


@pytest.mark.parametrize("alpha, expected", [
    (0.0, [1.0, 4.0, 9.0]),  # w: all difficulty stays with the input
    (0.5, [0.5, 0.5, 3.0]),  # sqrt(w / a)
    (1.0, [0.25, 0.0625, 1.0]),  # 1 / a: every input channel gets the same range
])  # fmt: skip
def test_a_table_worked_by_hand_where_dead_channels_are_left_alone(alpha, expected):
    torch.testing.assert_close(pre_quant_scale(AMAX, COLUMNS, alpha), torch.tensor(expected), rtol=1e-6, atol=0)
    dead = torch.tensor([0.0, 2.0**-31, 1.0, 1.0])
    assert pre_quant_scale(dead, torch.tensor([1.0, 1.0, 0.0, 1.0]), alpha).tolist() == [1, 1, 1, 1]


def test_no_channel_counts_as_quieter_than_three_in_four_are():
    amax = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0])
    assert awake(amax, 0.75).tolist() == [0.0, 3.0, 3.0, 3.0, 100.0]
    assert awake(amax, 0.0).tolist() == amax.tolist()


def test_a_modulations_vector_is_a_multiple_that_keeps_the_range_of_the_input():
    """With alpha 0.5 the plain one is (0.5, 0.5, 3) and what it makes of the ranges (2, 8, 3): 16 / 8 is missing."""
    scale = range_keeping_scale(AMAX, COLUMNS, 0.5)
    assert scale.tolist() == [1.0, 1.0, 6.0] and (AMAX * scale).max() == AMAX.max()
    assert range_keeping_scale(torch.zeros(2), torch.ones(2), 0.5).tolist() == [1.0, 1.0]


ATTENTION = SharedInput(("to_q",), "norm1.linear", modulation=(0, 1))
WEIGHT, BIAS = torch.arange(1.0, 37).view(12, 3), torch.arange(1.0, 13)
ROW = LayerAssignment("norm1.linear", "linear", (12, 3), reason="excluded")
SCALE, OTHER = torch.tensor([2.0, 0.5]), torch.tensor([4.0, 0.25])


def absorb(shared: SharedInput, row: LayerAssignment, scale: torch.Tensor, weight=WEIGHT, bias=BIAS):
    return absorb_scale(shared, row, lambda name: weight, lambda name: bias, scale)


def test_a_scales_bias_gets_the_factor_minus_one():
    row = absorb(ATTENTION, ROW, SCALE)
    assert row.output_scale.tolist() == [2, 0.5, 2, 0.5, *[1] * 8]
    assert row.output_shift.tolist() == [0, 0, 1, -0.5, *[0] * 8]
    assert rewritten(BIAS, row).tolist() == [2, 1, 2 * 3 + 1, 0.5 * 4 - 0.5, *range(5, 13)]
    assert torch.equal(rewritten(WEIGHT, row), WEIGHT * row.output_scale[:, None])
    assert row.reason == "excluded" and row.format is None
    assert absorb(replace(ATTENTION, modulation=(1, 0)), ROW, SCALE).output_shift.tolist() == [1, -0.5, *[0] * 10]


def test_factors_of_one_input_multiply_and_rows_have_their_part():
    """s1 s2 (1 + scale), whatever has been absorbed before."""
    twice, once = absorb(ATTENTION, absorb(ATTENTION, ROW, SCALE), OTHER), absorb(ATTENTION, ROW, SCALE * OTHER)
    assert torch.equal(rewritten(BIAS, twice), rewritten(BIAS, once))
    assert torch.equal(rewritten(BIAS[1:4], layer_of_rows(once, slice(1, 4))), rewritten(BIAS, once)[1:4])
    # without a bias, or beyond fp16, it absorbs nothing
    assert absorb(ATTENTION, ROW, SCALE, bias=None) is None
    assert absorb(ATTENTION, ROW, SCALE, bias=BIAS * 5e3) is not None
    assert absorb(ATTENTION, ROW, SCALE, bias=BIAS * 3e4) is None
    assert absorb(ATTENTION, ROW, SCALE, weight=WEIGHT * 1e4) is None


@pytest.mark.parametrize(
    "quiet, per_token, one_row, highest",
    [(0.001, False, False, 0.61), (0.5, False, True, 0.89), (0.5, False, False, 0.93), (1.0, False, False, 0.96),
     (0.001, True, False, 0.96)],
)  # fmt: skip
def test_a_static_range_holds_channels_that_wake_after_calibration(quiet, per_token, one_row, highest):
    """Equation 4 amplifies the 24 quiet channels of 32. Where they wake from fold to fold, they get room to grow.

    Of one row an image more room than of tokens, of which few are clipped.
    """
    generator = torch.Generator().manual_seed(0)
    amax = torch.tensor([1.0] * 24 + [8.0] * 7 + [10.0])
    rows = torch.rand(64, 32, generator=generator) * amax
    folds = torch.stack([amax, amax.clone()])
    folds[1, :24] *= quiet
    statistics = LayerStatistics("linear", amax.expand(20, -1), sample_of(rows), folds)
    reader, weight = LayerAssignment("to_q", "qkv", (4, 32)), torch.randn(4, 32, generator=generator) * 8 / amax
    formats = Enable(Pair("int8", "int8"), Pair("int8", "int8"), None)
    recipe = Recipe(3.0, "auto", collect_method="min-max", enable=formats, per_token=per_token)
    row = assign_linears(
        SharedInput(("to_q",), one_row=one_row), {"to_q": reader}, {"to_q": weight}, lambda name: weight,
        lambda name: None, {"to_q": statistics}, recipe,
    )["to_q"]  # fmt: skip
    smoothed = amax * row.pre_quant_scale
    assert smoothed[:24].max() / smoothed.max() == pytest.approx(highest, abs=0.01)


def test_what_one_fold_of_the_prompts_has_beyond_the_range_of_the_other():
    """With alpha 1 and weights of 1 every channel of a fold gets its range: what the other has beyond it is clipped."""
    folds, empty = torch.tensor([[1.0, 8.0], [3.0, 2.0]]), sample_of(torch.empty(0, 2))
    statistics = LayerStatistics("linear", folds.amax(0)[None], empty, folds)
    readers = Readers([], {}, torch.ones(2), statistics, pre_quant_scale)
    assert readers.clipped_squares(1.0, 0.0).tolist() == [(3 - 1) ** 2 / 2, (8 - 2) ** 2 / 2]
    for alpha, quiet in ((0.0, 0.0), (1.0, 1.0)):
        assert readers.clipped_squares(alpha, quiet).tolist() == [0.0, (8 - 3) ** 2 / 2]
    one = replace(statistics, folds=torch.stack([folds[0], torch.zeros(2)]))
    assert replace(readers, statistics=one).clipped_squares(1.0, 0.0).tolist() == [0.0, 0.0]


# Shifted inputs of convolutions, against torch's own asymmetric quantization


RECIPE = Recipe(3.0, None, shift=True, observer="mse")
INT8, bias_of_shift = FORMATS["int8"], convolutions.bias_of_shift
VALUES = 2 * drawn(20000)
SILU = F.silu(VALUES)


def shifted_layer(chosen: InputRange) -> LayerAssignment:
    return LayerAssignment("conv", "conv", (4, 3, 3, 3), "int8", "int8", activation_amax=chosen.amax,
                           activation_zero_point=chosen.zero_point)  # fmt: skip


def squared_error(values: Tensor, chosen: InputRange) -> float:
    return (shifted_layer(chosen).rounded_input(values) - values).square().sum().item()


def assigned(values: Tensor, amax: float | None = None, recipe: Recipe = RECIPE, scale: float = 1) -> LayerAssignment:
    values, weight = values[: len(values) // 12 * 12].view(-1, 12)[:128], 2 * scale * drawn(8, 3, 2, 2)
    amax = values.abs().max().item() if amax is None and len(values) else amax or 0.0
    statistics = LayerStatistics("conv", torch.tensor([[amax]]), sample_of(values))
    return assign_convolution(LayerAssignment("conv", "conv", (8, 3, 2, 2)), weight, None, statistics, recipe)


@pytest.mark.parametrize(
    "values, pays",
    [(VALUES, False), (SILU, True), (SILU - 3, True), (VALUES.abs(), True)],
    ids=["both", "silu", "below", "above"],
)
def test_an_input_is_shifted_where_the_output_gains(values, pays):
    layer, plain = assigned(values), assigned(values, recipe=replace(RECIPE, shift=False))
    assert plain.activation_zero_point == 0 and plain.bias is None
    assert (layer.activation_zero_point != 0) == pays
    if pays:
        assert layer.output_error <= SHIFT_PAYS * plain.output_error
    else:
        assert layer.activation_amax == plain.activation_amax


def test_a_bias_that_fp16_rounds_by_more_than_the_shift_gains_speaks_against_it(monkeypatch):
    """As if all weights of an output had the same sign, and more; or nothing to judge by, or no output to gain."""
    assert assigned(SILU).activation_zero_point
    assert assigned(torch.empty(0), 3.0).activation_zero_point == assigned(SILU, scale=0).activation_zero_point == 0
    monkeypatch.setattr(convolutions, "bias_of_shift", lambda *given: 1000 * bias_of_shift(*given))
    assert assigned(SILU).activation_zero_point == 0


def test_by_role_looks_for_the_smallest_error_of_convolutions_and_clips_nothing_of_linears():
    recipe = replace(RECIPE, observer=BY_ROLE)
    for role, observer in (("conv", "mse"), ("ffn", "min_max"), ("linear", "min_max")):
        expected = observed_range(VALUES, 20.0, role, replace(recipe, observer=observer))
        assert observed_range(VALUES, 20.0, role, recipe) == expected
    assert observed_range(VALUES, 20.0, "conv", recipe) != observed_range(VALUES, 20.0, "ffn", recipe)


def test_fp16_holds_the_bias_of_a_shifted_input(monkeypatch):
    """Far better than with the smallest scale that clips nothing. The others are at most 0.8 % larger."""
    monkeypatch.setattr("sd_quant.quantization.row_chunks.CHUNK", 2**14)
    weight, bias = drawn(256, 64, 3, 3), drawn(256, seed=1)
    layer = LayerAssignment("conv", "conv", tuple(weight.shape))
    plain = with_ranges(layer, weight, InputRange(3.0, -115), Recipe(3.0, None))
    nudged = with_shifted_bias(plain, weight, bias)

    def errors(layer: LayerAssignment) -> Tensor:
        scale = per_channel(layer.weight_scale, weight)
        exact = bias_of_shift(INT8.quantize(weight, scale), scale, layer.shift) + bias
        return (exact.half().float() - exact).abs()

    assert errors(nudged).mean() < errors(plain).mean() / 4
    assert (nudged.bias.half().float() - nudged.bias).abs().tolist() == errors(nudged).tolist()
    ratio = nudged.weight_scale / plain.weight_scale
    assert ratio.min() >= 1 and ratio.max() < 1.008


def test_all_codes_are_used_where_nothing_is_clipped():
    chosen = shifted_range(SILU, 1.0, RECIPE)
    assert (127 - chosen.zero_point) * shifted_layer(chosen).activation_scale == pytest.approx(1.0, rel=2e-2)
    layer = shifted_layer(shifted_range(SILU, SILU.max().item(), replace(RECIPE, observer="min_max")))
    codes = ((SILU - layer.shift) / layer.activation_scale).round()
    assert (codes.min().item(), codes.max().item()) == (-128, 127)


def test_no_other_range_of_a_shifted_input_has_a_smaller_error():
    """Of values with a long tail, of which half as many levels would clip more. Those that are tried are 1 % apart."""
    values = VALUES.abs() ** 3
    chosen = shifted_range(values, values.max().item(), RECIPE)
    assert chosen.zero_point == -128
    others = [InputRange(share * chosen.amax, -128) for share in torch.linspace(0.5, 1.5, 201).tolist()]
    assert squared_error(values, chosen) < 1.01 * min(squared_error(values, other) for other in others)
