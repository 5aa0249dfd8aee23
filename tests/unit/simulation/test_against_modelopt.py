"""Our ranges against those that NVIDIA ModelOpt calibrates for itself, on the same networks and the same calls.

With ``smoothing=modelopt`` both are fp32 throughout and compute the same formulas, but divide, multiply and take powers
in another order, each time off by 2^-24: 1e-5 leaves room for a hundred of these and for nothing else. fp16 enters only
in what the graph stores: the scales (relative 2^-11) and the vector that multiplies a layer's input.

One difference is deliberate. A channel that was never active gets 1. ModelOpt means to do the same, but asks for it
only when another factor is almost zero, and leaves such channels at its clamp of 1e4, so their weights vanish.
"""

import copy
import dataclasses
import warnings
from pathlib import Path

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model
from sd_quant.models.parts import SharedInput
from sd_quant.models.unet import EXCLUDED, layer_roles
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats.int8 import QMAX, per_channel, quantize
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import LayerStatistics, Sample
from sd_quant.simulation.modelopt import simulate

pytestmark = pytest.mark.slow
CHECKPOINT = Path(__file__).parents[3] / "checkpoints/sdxl_mini.nemo"
RELATIVE = 1e-5
LAYERS = {"small": (48, 18), "checkpoint": (124, 26)}  # linears and convolutions that level 3 quantizes


@pytest.fixture(scope="module")
def checkpoint(calibrated):
    """The shipped UNet, and its statistics over a few calls along the denoising."""
    model = load_model(open_nemo(CHECKPOINT))
    part, shapes = model.parts["unet_xl"].requires_grad_(False), model.contracts["unet_xl"].shapes
    random = torch.Generator().manual_seed(0)
    calls = []
    for step in (999.0, 499.0, 49.0):
        inputs = {
            name: torch.randn(shape, generator=random) for name, shape in shapes(batch=2, height=8, width=8).items()
        }
        calls.append(inputs | {"timesteps": torch.full((2,), step)})
    roles, now = layer_roles(part.unet), {}
    layers = {name: part.unet.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    wanted = draw(layers, range(len(calls)), 1, seed=0)
    with collect(part, layers, range(len(calls)), 1, lambda: (0, [now["call"]]), wanted) as statistics:
        for now["call"], inputs in enumerate(calls):
            part(**inputs)
    return dataclasses.replace(
        calibrated, part=lambda: copy.deepcopy(part), calls=calls, roles=roles, statistics=statistics
    )


def smoothquant(network: nn.Module, alpha: float, run) -> nn.Module:
    """``network`` as ModelOpt calibrates it for itself: everything but what its own diffusion recipes leave out."""
    rules = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
        {"quantizer_name": "*.input_quantizer", "cfg": {"num_bits": 8, "axis": None}},
        *({"quantizer_name": f"*{word}*", "enable": False} for word in EXCLUDED),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not calibrated, skip smoothing")  # those that are left out
        return mtq.quantize(network, {"quant_cfg": rules, "algorithm": {"method": "smoothquant", "alpha": alpha}}, run)


@pytest.fixture(scope="module", params=[0.5, 0.8, 1.0], ids="alpha {}".format)
def alpha(request) -> float:
    return request.param


@pytest.fixture(scope="module", params=LAYERS)
def both(request, calibrated, alpha):
    """Each quantized layer as we assign it and as ModelOpt left it, and its own weight."""
    network = calibrated if request.param == "small" else request.getfixturevalue("checkpoint")
    assignment, part, original = network.assignment(alpha, smoothing="modelopt"), network.part(), network.part().unet
    smoothquant(part, alpha, network.run)
    layers = [layer for layer in assignment.values() if layer.format]
    convolutions = sum(layer.role == "conv" for layer in layers)
    assert (len(layers) - convolutions, convolutions) == LAYERS[request.param]
    return [(layer, part.unet.get_submodule(layer.name), original.get_submodule(layer.name).weight) for layer in layers]


def close(ours: torch.Tensor, theirs: torch.Tensor, relative: float = RELATIVE) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=relative, atol=0)


def test_smoothing_vectors(both):
    """No channel of these networks is dead; one that is, is tested below."""
    linears = [(layer, module) for layer, module, _ in both if layer.role != "conv"]
    for layer, module in linears:
        close(layer.pre_quant_scale, module.input_quantizer.pre_quant_scale)
        assert layer.multiplies
    spread = max((layer.pre_quant_scale.max() / layer.pre_quant_scale.min()).item() for layer, _ in linears)
    assert spread > 2  # there was something to smooth


def test_convolutions_are_not_smoothed(both):
    for layer, module, _ in both:
        if layer.role == "conv":
            assert layer.pre_quant_scale is None and module.input_quantizer.pre_quant_scale is None


def test_smoothed_weights(both):
    for layer, module, weight in both:
        close(rewritten(weight, layer), module.weight)


def test_ranges_of_weights(both):
    for layer, module, _ in both:
        close(layer.weight_amax, module.weight_quantizer.amax.flatten())


def test_ranges_of_inputs(both):
    for layer, module, _ in both:
        assert module.input_quantizer.amax.numel() == 1
        close(torch.tensor(layer.activation_amax), module.input_quantizer.amax.squeeze())


def test_what_the_graph_stores_is_off_by_fp16s_rounding_and_no_more(both):
    for layer, module, _ in both:
        close(layer.weight_scale * QMAX, module.weight_quantizer.amax.flatten(), 2.0**-11 + RELATIVE)
        close(torch.tensor(layer.activation_scale * QMAX), module.input_quantizer.amax.squeeze(), 2.0**-11 + RELATIVE)


def test_a_channel_that_is_never_active_is_left_alone_where_modelopt_leaves_its_clamp(alpha):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 4, bias=False)).requires_grad_(False)
    weight, x = network[0].weight.clone(), torch.randn(16, 8)
    x[:, 2] = 0
    statistics = LayerStatistics("linear", x.abs().amax(0)[None], Sample(x, torch.arange(16)))
    recipe = Recipe(2, alpha, smoothing="modelopt")
    ours = derive({"0": "ffn"}, lambda name: weight, {"0": statistics}, recipe, [SharedInput(("0",))])["0"]
    smoothquant(network, alpha, lambda network: network(x))
    theirs = network[0].input_quantizer.pre_quant_scale
    active = torch.arange(8) != 2
    close(ours.pre_quant_scale[active], theirs[active])
    close(rewritten(weight, ours)[:, active], network[0].weight[:, active])
    assert (ours.pre_quant_scale[2].item(), theirs[2].item()) == (1, 1e4)
    close(rewritten(weight, ours)[:, 2], 1e4 * network[0].weight[:, 2])


@pytest.mark.parametrize("smoothing", ["folded", "modelopt"])
def test_the_simulation_rounds_to_the_int8_weights_that_are_exported(calibrated, smoothing):
    """But for ties: ModelOpt multiplies with 127 / amax where ONNX divides by the scale."""
    assignment, original = calibrated.assignment(0.8, smoothing=smoothing), calibrated.part().unet
    simulated = simulate(calibrated.part().unet, assignment)
    flipped, total = 0, 0
    for layer in assignment.values():
        module, weight = simulated.get_submodule(layer.name), original.get_submodule(layer.name).weight
        expected = rewritten(weight, layer)
        if layer.format is None:
            assert torch.equal(module.weight, expected)
            continue
        stored = quantize(expected, per_channel(layer.weight_scale, expected)).float()
        scale = per_channel(layer.weight_scale, weight)
        rounded = module.weight_quantizer(module.weight) / scale
        torch.testing.assert_close(rounded, rounded.round(), rtol=1e-6, atol=0)
        differs = rounded.round() != stored
        to_tie = ((module.weight / scale).abs() % 1 - 0.5).abs()
        assert (to_tie[differs] < 1e-4).all(), layer.name
        flipped, total = flipped + int(differs.sum()), total + differs.numel()
    assert flipped < 1e-5 * total  # measured: 2 of 886,784
