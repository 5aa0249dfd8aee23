"""Our ranges against those that NVIDIA ModelOpt calibrates for itself, on the same networks and the same calls.

With ``smoothing=modelopt`` both are fp32 throughout and compute the same formulas, but divide, multiply and take powers
in another order, each time off by 2^-24: 1e-5 leaves room for a hundred of these and for nothing else. fp16 enters only
in what the graph stores: the scales (relative 2^-11) and the vector that multiplies a layer's input.

One difference is deliberate, and no network here shows it. A channel that was never active gets 1. ModelOpt means to do
the same, but asks for it only when another factor is almost zero, and leaves such channels at its clamp of 1e4.
"""

import warnings
from pathlib import Path

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import nn

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model
from sd_quant.models.unet import EXCLUDED
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.formats import FORMATS
from tests.layers import drawn

pytestmark = [pytest.mark.commit, pytest.mark.slow]
CHECKPOINT = Path(__file__).parents[3] / "checkpoints/sdxl_mini.nemo"
RELATIVE = 1e-5
LAYERS = {"small": (48, 18), "checkpoint": (124, 26)}  # linears and convolutions that level 3 quantizes


@pytest.fixture(scope="module")
def checkpoint(calibrate):
    """The shipped UNet, and its statistics over a few calls along the denoising."""
    model = load_model(open_nemo(CHECKPOINT))
    shapes = model.contracts["unet_xl"].shapes(batch=2, height=8, width=8)
    calls = [
        {name: drawn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
        | {"timesteps": torch.full((2,), step)}
        for step in (999.0, 499.0, 49.0)
    ]
    return calibrate(model.parts["unet_xl"].requires_grad_(False), calls)


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


def close(ours: torch.Tensor, theirs: torch.Tensor, relative: float = RELATIVE) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=relative, atol=0)


@pytest.mark.parametrize("name, alpha", [("small", 0.5), ("small", 1.0), ("checkpoint", 0.8)])
def test_vectors_weights_and_ranges_are_those_of_modelopt(name, alpha, calibrated, request):
    """And what the graph stores is off by fp16's rounding and no more."""
    network = calibrated if name == "small" else request.getfixturevalue("checkpoint")
    assignment, part, original = network.assignment(alpha, smoothing="modelopt"), network.part(), network.part().unet
    smoothquant(part, alpha, network.run)
    layers, spreads = [layer for layer in assignment.values() if layer.format], []
    for layer in layers:
        module, weight = part.unet.get_submodule(layer.name), original.get_submodule(layer.name).weight
        of_weight, of_input = module.weight_quantizer.amax.flatten(), module.input_quantizer.amax.squeeze()
        if layer.role == "conv":
            assert layer.pre_quant_scale is None and module.input_quantizer.pre_quant_scale is None
        else:
            assert layer.multiplies
            close(layer.pre_quant_scale, module.input_quantizer.pre_quant_scale)
            spreads.append((layer.pre_quant_scale.max() / layer.pre_quant_scale.min()).item())
        close(rewritten(weight, layer), module.weight)
        close(layer.weight_amax, of_weight)
        close(torch.tensor(layer.activation_amax), of_input)
        close(layer.weight_scale * FORMATS["int8"].largest_code, of_weight, 2.0**-11 + RELATIVE)
        close(torch.tensor(layer.activation_scale * FORMATS["int8"].largest_code), of_input, 2.0**-11 + RELATIVE)
    assert (len(spreads), len(layers) - len(spreads)) == LAYERS[name]
    assert max(spreads) > 2  # there was something to smooth
