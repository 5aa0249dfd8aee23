"""Measured on a network small enough to quantize by hand, with torch's own fake quantization."""

import copy
from collections.abc import Collection

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.errors import ConfigError
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.sensitivity import (
    Sensitivity,
    Switched,
    curve_points,
    guided,
    layers_to_keep,
    sensitivity_of,
    sensitivity_rows,
)
from tests.layers import drawn

pytestmark = pytest.mark.commit

NAMES = ["0", "2", "4"]
RANGES = {"0": 4.0, "2": 0.5, "4": 8.0}  # of the layers' inputs; that of "2" is much too narrow
SMOOTHING = torch.tensor([0.5, 1.0, 2.0, 4.0])  # of the input of "4"; powers of two, which fp16 holds
X = drawn(256, 4, seed=1)


torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3)).requires_grad_(False)


def assigned(name: str) -> LayerAssignment:
    weight, smoothing = NETWORK.get_submodule(name).weight, SMOOTHING if name == "4" else None
    layer = LayerAssignment(name, "ffn", tuple(weight.shape), pre_quant_scale=smoothing)
    return with_ranges(layer, weight, InputRange(RANGES[name]), Recipe(3.0, 0.8))


ASSIGNMENT = {name: assigned(name) for name in NAMES}


def by_hand(quantized: Collection[str]) -> Tensor:
    x = X
    for name, layer in ASSIGNMENT.items():
        linear = NETWORK.get_submodule(name)
        weight = linear.weight
        if layer.pre_quant_scale is not None:
            x, weight = x * SMOOTHING, weight / SMOOTHING
        if name in quantized:
            zeros = torch.zeros(len(weight), dtype=torch.int32)
            x = torch.fake_quantize_per_tensor_affine(x, layer.activation_scale, 0, -128, 127)
            weight = torch.fake_quantize_per_channel_affine(weight, layer.weight_scale, zeros, 0, -128, 127)
        x = F.linear(x, weight, linear.bias)
        x = x if name == NAMES[-1] else F.gelu(x)
    return x


def error_by_hand(quantized: Collection[str]) -> float:
    return relative_error(NETWORK(X), by_hand(quantized))


@pytest.fixture(scope="module")
def sensitivity() -> Sensitivity:
    simulated = simulate(copy.deepcopy(NETWORK), ASSIGNMENT)
    switched, asked = Switched(simulated, lambda: simulated(X), NAMES), []
    found = sensitivity_of(lambda quantized: asked.append(None) or switched.error(quantized), NAMES, 2)
    assert len(asked) == len(NAMES) + len(curve_points(2, len(NAMES)))
    torch.testing.assert_close(simulated(X), by_hand(NAMES))
    return found


def test_the_error_of_a_layer_is_that_of_the_network_with_it_alone_quantized(sensitivity):
    found = sensitivity.network_error
    assert found == pytest.approx({name: error_by_hand([name]) for name in NAMES}, rel=1e-3)
    assert list(found) == sorted(NAMES, key=lambda name: -error_by_hand([name])) and next(iter(found)) == "2"


def test_the_curve_keeps_the_worst_layers_first(sensitivity):
    order = list(sensitivity.network_error)
    assert [point["kept"] for point in sensitivity.curve] == [0, 1, 2]
    for point in sensitivity.curve:
        rest = order[point["kept"] :]
        assert point["relative_error"] == pytest.approx(error_by_hand(rest), rel=1e-3)
        assert point["predicted"] == pytest.approx(sum(error_by_hand([name]) ** 2 for name in rest) ** 0.5, rel=1e-3)
    errors = [point["relative_error"] for point in sensitivity.curve]
    assert errors[0] > 2 * errors[1] > 2 * errors[2] > 0
    table = sensitivity_rows(sensitivity, ASSIGNMENT, kept=2)
    for rank, (row, (name, error)) in enumerate(zip(table, sensitivity.network_error.items(), strict=True), 1):
        assert (row["name"], row["network_error"], row["rank"]) == (name, error, rank)
        assert (row["kept"], row["role"]) == (rank <= 2, "ffn")


def test_layers_that_are_not_named_stay_as_they_are():
    simulated = simulate(copy.deepcopy(NETWORK), ASSIGNMENT)
    found = sensitivity_of(Switched(simulated, lambda: simulated(X), ["0", "4"]).error, ["0", "4"], 0)
    assert found.network_error.keys() == {"0", "4"}
    expected = relative_error(by_hand(["2"]), by_hand(["2", "4"]))
    assert found.network_error["4"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("keep, kept", [(0, 0), (9, 9), (0.0, 0), (0.3, 3), (0.01, 0), (10, None), (0.99, None)])
def test_a_budget_is_a_number_of_layers_or_a_fraction_and_does_not_keep_everything(keep, kept):
    if kept is not None:
        assert layers_to_keep(keep, 10) == kept
        return
    with pytest.raises(ConfigError, match=f"keep is {keep}, which keeps all 10 layers .* keep at most 9"):
        layers_to_keep(keep, 10)
    assert [curve_points(*each) for each in ((0, 1), (2, 3), (7, 16))] == [[0], [0, 1, 2], [0, 1, 2, 4, 7, 8]]


def test_an_error_that_both_halves_have_counts_once():
    """And one of the conditional half alone as often as guidance multiplies it; what has no halves stays as it is."""
    output, error = torch.randn(2, 3), torch.tensor([[1.0, 2.0, 3.0]])
    torch.testing.assert_close(guided(output + error, 5.0) - guided(output, 5.0), error)
    alone = torch.cat([torch.zeros(1, 3), error])
    torch.testing.assert_close(guided(output + alone, 5.0) - guided(output, 5.0), 5 * error)
    assert torch.equal(guided(output[:1], 5.0), output[:1])
