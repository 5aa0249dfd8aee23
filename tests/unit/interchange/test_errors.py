"""What a candidate's layer costs, against the same computed with whole networks."""

import pytest
import torch
from torch import nn

from sd_quant.files.tensors import lazy
from sd_quant.interchange.denoiser import QuantizedLayer
from sd_quant.interchange.errors import alone, layer_errors, put_in
from sd_quant.interchange.inputs import Affine, Multiplied, RowInteger
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.commit


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Flatten(2), nn.Linear(16, 12), nn.Linear(12, 5))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rounded(network: nn.Module, name: str, inputs=None) -> QuantizedLayer:
    weight = network.get_submodule(name).weight.detach()
    return QuantizedLayer("int4", "1 for all", weight.numel() // 2, lazy((weight * 8).round() / 8), inputs)


@torch.no_grad()
def test_a_layer_is_judged_on_the_inputs_that_it_has_in_full_precision(network, x):
    inputs = RowInteger(-8, 7)
    layers = {"0": rounded(network, "0", Affine(scale=0.1)), "2": rounded(network, "2", inputs)}
    errors = layer_errors(network, layers, lambda: [network(x), network(2 * x)])
    flat = [network[1](network[0](each)) for each in (x, 2 * x)]
    expected = torch.cat([each @ network[2].weight.T for each in flat])
    theirs = torch.cat([inputs(each) @ layers["2"].weight.read().T for each in flat])
    assert errors["2"].output == pytest.approx(relative_error(expected, theirs), rel=1e-5)
    assert errors["2"].weight == pytest.approx(relative_error(network[2].weight, layers["2"].weight.read()), rel=1e-6)
    images = [torch.nn.functional.conv2d(each, network[0].weight, None, 2, 1) for each in (x, 2 * x)]
    theirs = [torch.nn.functional.conv2d(Affine(scale=0.1)(each), layers["0"].weight.read(), None, 2, 1)
              for each in (x, 2 * x)]  # fmt: skip
    assert errors["0"].output == pytest.approx(relative_error(torch.cat(images), torch.cat(theirs)), rel=1e-5)


@pytest.mark.parametrize("smooths", [False, True])
@torch.no_grad()
def test_a_branch_is_multiplied_with_inputs_as_they_come_or_smoothed(network, x, smooths):
    """And what is left of the weight with their codes."""
    inputs, residual = RowInteger(-8, 7), rounded(network, "3").weight.read()
    up, down = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in ((5, 2), (2, 12)))
    factor = torch.rand(12, generator=torch.Generator().manual_seed(3)) + 0.5 if smooths else torch.ones(12)
    own = Multiplied(factor, False, inputs) if smooths else inputs
    layer = QuantizedLayer("int4", "1 for all", 30, lazy(residual + up @ down), own, (lazy(up), lazy(down)))
    read = network[:3](x) * factor
    expected = inputs(read) @ residual.T + read @ (up @ down).T
    error = relative_error(network[:3](x) @ network[3].weight.T, expected)
    assert layer_errors(network, {"3": layer}, lambda: network(x))["3"].output == pytest.approx(error, rel=1e-5)
    with put_in(network, "3", layer):
        torch.testing.assert_close(network(x), expected + network[3].bias)


@pytest.mark.parametrize("zero_point", [-110, 0, 3])
def test_static_codes_are_torchs(x, zero_point):
    expected = torch.fake_quantize_per_tensor_affine(x, 0.02, zero_point, -128, 127)
    torch.testing.assert_close(Affine(scale=0.02, zero_point=zero_point)(x), expected)


@torch.no_grad()
def test_each_layer_stands_alone_in_the_network_which_is_then_as_it_was(network, x):
    layers = {name: rounded(network, name, RowInteger(-8, 7) if name == "3" else None) for name in ("0", "2", "3")}
    before = {name: each.clone() for name, each in network.state_dict().items()}
    full = network(x)
    errors = alone(network, layers, list(layers), lambda: network(x))
    assert list(errors.values()) == sorted(errors.values(), reverse=True) and min(errors.values()) > 1e-3
    for name, error in errors.items():
        with put_in(network, name, layers[name]):
            assert relative_error(full, network(x)) == pytest.approx(error)
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())
    assert torch.equal(network(x), full)
