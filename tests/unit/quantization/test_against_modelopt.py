"""Our scales against those that NVIDIA ModelOpt calibrates for itself, on the same network and the same calls.

Ours are rounded to fp16 (relative 2^-11), and the range of a smoothed input or weight follows from a smoothing scale
that was rounded too: together 2^-10.
"""

import warnings

import modelopt.torch.quantization as mtq
import pytest
import torch

from sd_quant.quantization.int8 import QMAX, per_channel, quantize_weight
from sd_quant.quantization.simulate import modelopt_config, simulate

RELATIVE = 2.0**-10


@pytest.fixture(scope="module", params=[0.5, 0.8, 1.0], ids="alpha {}".format)
def both(request, calibrated):
    """The assignment, and the UNet that ModelOpt calibrated by SmoothQuant."""
    assignment, part = calibrated.assignment(request.param), calibrated.part()
    config = modelopt_config(assignment) | {"algorithm": {"method": "smoothquant", "alpha": request.param}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not calibrated, skip smoothing")  # those that stay in high precision
        mtq.quantize(part, prefixed(config), calibrated.run)
    layers = [layer for layer in assignment.values() if layer.format == "int8"]
    return [(layer, part.unet.get_submodule(layer.name)) for layer in layers]


def prefixed(config: dict) -> dict:
    """The assignment names layers of the UNet, ModelOpt is given the part around it, which takes our inputs."""
    deny, *rules = config["quant_cfg"]
    named = [rule | {"quantizer_name": f"unet.{rule['quantizer_name']}"} for rule in rules]
    return config | {"quant_cfg": [deny, *named]}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=RELATIVE, atol=0)


def test_smoothing_scales(both):
    linears = [(layer, module) for layer, module in both if layer.role != "conv"]
    assert len(linears) == 48
    for layer, module in linears:
        close(layer.pre_quant_scale, module.input_quantizer.pre_quant_scale)
    spread = max((layer.pre_quant_scale.max() / layer.pre_quant_scale.min()).item() for layer, _ in linears)
    assert spread > 2  # there was something to smooth


def test_convolutions_are_not_smoothed(both):
    convolutions = [(layer, module) for layer, module in both if layer.role == "conv"]
    assert len(convolutions) == 18
    assert all(layer.pre_quant_scale is None for layer, _ in convolutions)
    assert all(module.input_quantizer.pre_quant_scale is None for _, module in convolutions)


def test_smoothed_weights(both, calibrated):
    unet = calibrated.part().unet
    for layer, module in both:
        weight = unet.get_submodule(layer.name).weight
        close(weight if layer.pre_quant_scale is None else weight / layer.pre_quant_scale, module.weight)


def test_ranges_of_weights(both):
    for layer, module in both:
        close(layer.weight_scale * QMAX, module.weight_quantizer.amax.flatten())


def test_ranges_of_inputs(both):
    for layer, module in both:
        assert module.input_quantizer.amax.numel() == 1
        close(torch.tensor(layer.activation_scale * QMAX), module.input_quantizer.amax.squeeze())


def test_the_simulation_rounds_to_the_int8_weights_that_are_exported(calibrated):
    """But for ties: ModelOpt multiplies with 127 / amax where ONNX divides by the scale."""
    assignment, original = calibrated.assignment(0.8), calibrated.part().unet
    simulated = simulate(calibrated.part().unet, assignment)
    flipped, total = 0, 0
    for layer in assignment.values():
        module, weight = simulated.get_submodule(layer.name), original.get_submodule(layer.name).weight
        if layer.format is None:
            assert torch.equal(module.weight, weight)
            continue
        stored = quantize_weight(weight, layer.weight_scale, layer.pre_quant_scale).float()
        scale = per_channel(layer.weight_scale, weight)
        rounded = module.weight_quantizer(module.weight) / scale
        torch.testing.assert_close(rounded, rounded.round(), rtol=1e-6, atol=0)
        differs = rounded.round() != stored
        to_tie = ((module.weight / scale).abs() % 1 - 0.5).abs()
        assert (to_tie[differs] < 1e-4).all(), layer.name
        flipped, total = flipped + int(differs.sum()), total + differs.numel()
    assert flipped < 1e-5 * total  # measured: 2 of 886,784
