import math

import pytest
import torch

from sd_quant.errors import SdQuantError
from sd_quant.inference import parity
from sd_quant.inference.parity import (
    Simulation,
    WatchedVariant,
    checked_entry,
    distance,
    layer_parity,
    run_simulation,
)
from sd_quant.quantization.assignment import LayerAssignment


class Doubling:
    name, inputs, device = "doubling", {"x": torch.float32}, torch.device("cpu")

    def __call__(self, **inputs):
        return {"out": 2 * inputs["x"]}

    def close(self):
        pass


def test_an_error_within_its_tolerance_is_recorded():
    assert checked_entry("vae", 1e-4, 1e-3) == {"relative_error": 1e-4, "tolerance": 1e-3}


@pytest.mark.parametrize("error", [2e-3, math.nan, math.inf])
def test_an_error_beyond_its_tolerance_fails_the_job(error):
    with pytest.raises(SdQuantError, match="^the engine differs from torch in vae by"):
        checked_entry("vae", error, 1e-3)


def test_the_watched_unet_keeps_the_inputs_of_the_middle_call():
    variant = WatchedVariant({"unet_xl": Doubling(), "vae": Doubling()}, {"unet_xl": 2})
    for value in range(4):
        x = torch.full((1,), float(value))
        assert variant["unet_xl"](x=x)["out"] == 2 * value
        x += 100  # what was seen is a copy
    variant["vae"](x=torch.full((1,), 7.0))
    variant["vae"](x=torch.full((1,), 8.0))
    assert variant.seen["unet_xl"]["x"] == 2
    assert variant.seen["vae"]["x"] == 7


def test_an_output_of_zeros_or_none_at_all_is_no_agreement():
    zeros = torch.zeros(2)
    assert distance(zeros, zeros) == distance(torch.ones(2), torch.full((2,), torch.nan)) == math.inf


def test_a_layer_is_compared_where_its_input_is_not_the_zeros_of_the_unconditional_half(monkeypatch):
    monkeypatch.setattr(parity, "TOKENS", 4)
    monkeypatch.setattr(parity, "PIXELS", 2)
    unet = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(2), torch.nn.Linear(36, 7))

    class Engine:
        def __call__(self, x):
            return {"out": unet(x)}

    layers = {
        name: LayerAssignment(name, "linear", tuple(unet.get_submodule(name).weight.shape), format="int8")
        for name in ("0", "2")
    }
    x = torch.cat([torch.zeros(1, 3, 6, 6), torch.rand(1, 3, 6, 6)])
    with torch.no_grad():
        found = run_simulation(Engine(), unet, {"x": x}, layers)
        assert torch.equal(found.output, unet(x))
        assert found.inputs["0"].shape == (1, 3, 2, 2) and found.inputs["2"].shape == (1, 4, 36)
        assert all(inputs.any() for inputs in found.inputs.values())
        expected = unet[2](found.inputs["2"].float()) - unet[2].bias
    torch.testing.assert_close(found.outputs["2"], expected, atol=1e-3, rtol=1e-3)


def layer(name: str, activation_format: str) -> LayerAssignment:
    return LayerAssignment(name, "linear", (1, 1), format="int8", activation_format=activation_format)


LAYERS = {"narrow": layer("narrow", "int8"), "wide": layer("wide", "fp8")}  # tolerances of 1e-2 and 3e-2
ONE = torch.ones(1)


def parity_of(errors: dict[str, float], network: float, simulated: float = 0.1) -> dict:
    """Of layers and a network that compute 1 and so much more."""
    simulation = Simulation(ONE + simulated, {}, dict.fromkeys(LAYERS, ONE))
    outputs = {name: ONE + errors[name] for name in LAYERS}
    return layer_parity(simulation, ONE, ONE + network, LAYERS, outputs, "unet")


def test_the_worst_layer_is_the_one_nearest_its_tolerance():
    found = parity_of({"narrow": 0.008, "wide": 0.015}, network=0.1)["quantized_layers"]
    assert (found["count"], found["worst"], found["tolerance"]) == (2, "narrow", 0.01)
    with pytest.raises(SdQuantError, match="layer wide by 0.04 "):
        parity_of({"narrow": 0.008, "wide": 0.04}, network=0.1)


def test_the_network_may_be_half_as_far_again_from_full_precision_as_its_simulation():
    exact = dict.fromkeys(LAYERS, 0.0)
    found = parity_of(exact, network=0.16)["unet_quantized"]
    assert found["simulation_relative_error"] == pytest.approx(0.1)
    assert (found["relative_error"], found["tolerance"]) == (pytest.approx(0.16), pytest.approx(0.17))
    with pytest.raises(SdQuantError, match="the quantized unet by 0.18 "):
        parity_of(exact, network=0.18)
