import csv
import io
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization import linears, row_chunks
from sd_quant.quantization.assignment import FIXED_ALPHA, LayerAssignment, rewritten
from sd_quant.quantization.budget import with_weights
from sd_quant.quantization.derivation import derive, derive_nearest
from sd_quant.quantization.linears import ALPHAS
from sd_quant.quantization.low_rank import low_rank
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Enable, Pair, Recipe, excluded
from sd_quant.quantization.row_chunks import output_error
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
    monkeypatch.setitem(OBSERVERS, "half", lambda values, amax, **_: given.append((values, amax)) or amax / 2)
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


@pytest.mark.parametrize("shared", [False, True])
def test_query_and_key_of_one_input_share_the_down_of_their_branch(shared):
    rows = drawn(64, 64, seed=1)
    roles = {"to_q": "qkv", "ff": "ffn", "to_k": "qkv", "alone": "qkv"}
    weights = {name: drawn(32, 64, seed=seed) for seed, name in enumerate(roles)}
    statistics = {name: seen("linear", [rows.abs().amax(0).tolist()], rows) for name in roles}
    inputs = [SharedInput(("to_q", "ff", "to_k")), SharedInput(("alone",))]
    recipe = replace(INT4, quant_level=3.0, alpha=0.5, rank=4, shared_branch=shared)
    for fitted in (recipe, replace(recipe, branch_rounds=1)):
        found = derive(roles, weights.__getitem__, statistics, fitted, inputs)
        downs = {name: layer.low_rank[1] for name, layer in found.items()}
        assert (downs["to_q"] is downs["to_k"]) == shared
        assert not any(torch.equal(downs["to_q"], downs[name]) for name in ("ff", "alone"))
        assert all(layer.low_rank[0].shape == (32, 4) for layer in found.values())


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
