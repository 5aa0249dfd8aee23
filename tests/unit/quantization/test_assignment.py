import csv
import io

import pytest
import torch

from sd_quant.calibration.statistics import LayerStatistics
from sd_quant.errors import SdQuantError
from sd_quant.quantization.assignment import LayerAssignment, Recipe, derive

ROLES = {"conv_in": "excluded", "conv": "conv", "ff": "ffn", "to_q": "qkv"}
WEIGHTS = {
    "conv_in": torch.ones(2, 4, 3, 3),
    "conv": torch.tensor([2.54, -5.08]).view(2, 1, 1, 1).expand(2, 3, 3, 3),
    "ff": torch.tensor([[127.0, 0.0], [-127.0, 508.0]]),
    "to_q": torch.ones(2, 2),
}
STATISTICS = {
    "conv": LayerStatistics("conv", torch.tensor([[254.0, 127.0], [381.0, 254.0]])),  # [prompts, steps]
    "ff": LayerStatistics("linear", torch.tensor([[127.0, 1.0], [1.0, 2032.0]])),  # [steps, in_features]
    "to_q": LayerStatistics("linear", torch.ones(2, 2)),
}


def assign(quant_level: float = 2.5, collect_method: str = "min-max", **changes) -> dict[str, LayerAssignment]:
    return derive(ROLES, WEIGHTS.__getitem__, STATISTICS | changes, Recipe(quant_level, 0.5, 1.0, collect_method))


def test_a_convolution_worked_by_hand():
    layer = assign()["conv"]
    assert layer.weight_scale.tolist() == [float(torch.tensor(scale).half()) for scale in (0.02, 0.04)]
    assert layer.activation_scale == 2.0  # over prompts max (381, 254), over steps min 254
    assert (layer.pre_quant_scale, layer.alpha, layer.weight_axis) == (None, None, 0)


def test_a_linear_worked_by_hand():
    layer = assign()["ff"]
    assert layer.pre_quant_scale.tolist() == [1.0, 0.5]  # sqrt(127 / 127), sqrt(508 / 2032)
    assert layer.weight_scale.tolist() == [1.0, 8.0]  # rows (127, 0) and (-127, 1016)
    assert layer.activation_scale == 8.0  # max(127 * 1, 2032 * 0.5) / 127
    assert (layer.format, layer.alpha) == ("int8", 0.5)


def test_percentile_and_collect_method_are_for_convolutions_alone():
    one, other = assign(collect_method="min-max"), assign(collect_method="global_min")
    assert (one["conv"].activation_scale, other["conv"].activation_scale) == (2.0, 1.0)
    assert one["ff"].activation_scale == other["ff"].activation_scale


def test_every_layer_has_a_row_and_every_row_in_high_precision_a_reason():
    for level, quantized in ((1, {"conv"}), (2, {"conv", "ff"}), (2.5, {"conv", "ff", "to_q"})):
        rows = {name: layer.row() for name, layer in assign(level).items()}
        assert list(rows) == list(ROLES)
        assert {name for name, row in rows.items() if row["format"] == "int8"} == quantized
        assert all(bool(row["reason"]) != (row["format"] == "int8") for row in rows.values())


def test_a_row_is_plain_values_that_a_csv_holds():
    row = assign()["ff"].row()
    text = io.StringIO()
    csv.DictWriter(text, row).writerow(row)
    assert text.getvalue().strip() == "ff,ffn,2x2,int8,,0.5,8.0,1.0,8.0,0.5,1.0"


def test_nothing_that_was_given_is_changed():
    before = {name: weight.clone() for name, weight in WEIGHTS.items()}, STATISTICS["ff"].amax.clone()
    assign()
    assert all(torch.equal(before[0][name], weight) for name, weight in WEIGHTS.items())
    assert torch.equal(before[1], STATISTICS["ff"].amax)


def test_a_layer_that_only_saw_zeros_is_refused_by_name():
    with pytest.raises(SdQuantError, match="layer ff only ever saw zeros"):
        assign(ff=LayerStatistics("linear", torch.zeros(2, 2)))


def test_a_layer_that_calibration_never_reached_is_refused_by_name():
    with pytest.raises(SdQuantError, match="layer to_q was never reached"):
        derive(ROLES, WEIGHTS.__getitem__, {"conv": STATISTICS["conv"], "ff": STATISTICS["ff"]},
               Recipe(2.5, 0.5, 1.0, "min-max"))  # fmt: skip


def test_a_layer_in_high_precision_needs_no_statistics():
    recipe = Recipe(1, 0.5, 1.0, "min-max")
    assert derive(ROLES, WEIGHTS.__getitem__, {"conv": STATISTICS["conv"]}, recipe)["to_q"].format is None
