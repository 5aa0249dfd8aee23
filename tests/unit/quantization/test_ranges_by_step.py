"""How large a layer's inputs are at each step, against numbers worked by hand."""

from dataclasses import replace

import pytest
import torch

from sd_quant.quantization.ranges_by_step import ranges_by_step
from sd_quant.quantization.statistics import LayerStatistics
from tests.layers import drawn, sample_of, static_layer

pytestmark = pytest.mark.commit


def test_each_step_has_the_quartiles_of_a_linears_channels_or_a_convolutions_prompts():
    """Five channels at two steps, and three prompts at two."""
    sample = sample_of(drawn(2, 5))
    channels = torch.tensor([[1.0, 2, 3, 4, 9], [0, 0, 0, 0, 8]])
    prompts = torch.tensor([[1.0, 10], [2, 30], [3, 20]])
    found = {"linear": LayerStatistics("linear", channels, sample), "conv": LayerStatistics("conv", prompts, sample)}
    row = static_layer(drawn(4, 5), "int8", True, activation_amax=6.35)
    rows = ranges_by_step({"linear": row, "conv": replace(row, activation_zero_point=-40)}, found)
    columns = ("name", "step", "least", "first_quartile", "median", "third_quartile", "largest")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("linear", 1, 1, 2, 3, 4, 9), ("linear", 2, 0, 0, 0, 0, 8),
        ("conv", 1, 1, 1.5, 2, 2.5, 3), ("conv", 2, 10, 15, 20, 25, 30),
    ]  # fmt: skip
    assert [row["kept"] for row in rows] == pytest.approx([6.35, 6.35, 8.35, 8.35], rel=1e-3)  # shifted by 40 codes


@pytest.mark.parametrize("change", [{"pre_quant_scale": torch.ones(5)}, {"per_token": True}, {"rotation": 16}])
def test_what_a_recipe_keeps_is_said_where_the_input_is_rounded_as_it_is(change):
    found = {"layer": LayerStatistics("linear", torch.ones(1, 5), sample_of(drawn(2, 5)))}
    row = replace(static_layer(drawn(4, 5), "int8", True), **change)
    assert [row["kept"] for row in ranges_by_step({"layer": row}, found)] == [None]
    assert ranges_by_step({"layer": replace(row, activation_format=None)}, found) == []
