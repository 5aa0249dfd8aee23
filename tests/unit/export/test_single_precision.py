"""Parts that compute in fp32, as decoders and T5 do: codes are the same, and all that is no code is fp32."""

import copy
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.engines import load_engine, why_not
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.models.parts import Contract, SharedInput
from sd_quant.models.roles import roles_of
from sd_quant.numbers import relative_error
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe, formats_used
from sd_quant.simulation.modelopt import simulate
from tests.presets import recipe_of

pytestmark = [pytest.mark.commit, pytest.mark.slow]
WIDTH = 256
CONTRACT = Contract({"z": ("batch", WIDTH, 4, 4)}, ("dec",), {"z": torch.float32}, torch.float32)


class Decoder(nn.Module):
    """A convolution with a shifted input, and two linears that each smooth their own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.conv(z).flatten(2).transpose(1, 2)
        return self.two(nn.functional.silu(self.one(nn.functional.silu(tokens))))


class Projection(nn.Module):
    """A linear whose output is the network's, as of CLIP's text_projection."""

    def __init__(self, bias: bool):
        super().__init__()
        self.one = nn.Linear(WIDTH, 64, bias=bias)

    def forward(self, z: Tensor) -> Tensor:
        return self.one(z.mean((2, 3)))


def exported(make: Callable[[], nn.Module], recipe: Recipe, z: Tensor, path: Path) -> tuple[Tensor, Tensor, dict]:
    """What a network answers to ``z``, what its simulation does, and its assignment, whose graph is written."""
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    roles = roles_of(network, ())
    layers = {name: network.get_submodule(name) for name in roles}
    with collect(network, layers, [0, 1], 1, lambda: (0, [0, 1]), draw(layers, [0, 1], 1, 0)) as statistics:
        full = network(z=z)
    alone = [SharedInput((name,)) for name in roles if name != "conv"]
    assignment = derive(
        roles, lambda name: layers[name].weight, statistics.layers, recipe, alone,
        bias_of=lambda name: layers[name].bias,
    )  # fmt: skip
    read = network.state_dict().__getitem__
    write_onnx(trace(make, CONTRACT), path, inputs=1, prefix="", read=read, assignment=assignment)
    onnx.checker.check_model(path, full_check=True)
    return full, simulate(copy.deepcopy(network), assignment)(z), assignment


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("preset", ["int8_weight_only", "int8_dynamic"])
def test_a_linear_may_end_the_graph(bias, preset, tmp_path: Path):
    z, path = torch.randn(2, WIDTH, 4, 4, generator=torch.Generator().manual_seed(0)), tmp_path / "text.onnx"
    _, simulated, _ = exported(lambda: Projection(bias), recipe_of(preset, "quant_level=3"), z, path)
    found = load_engine("onnxruntime", path)(z=z)
    assert list(found) == [value.name for value in onnx.load(path).graph.output] == ["dec"]
    assert relative_error(simulated, found["dec"]) < 1e-3


@pytest.mark.parametrize(
    "preset",
    [
        *("int8", "int8_dynamic", "fp8", "convrot_w4a4", "mxfp8"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("svdquant_w4a4", "svdquant_nvfp4", "q4_k_weight_only")
        ),
    ],
)
def test_it_computes_what_the_simulation_does(preset, tmp_path: Path):
    recipe, path = recipe_of(preset, "quant_level=3"), tmp_path / "vae.onnx"
    z = nn.functional.silu(torch.randn(2, WIDTH, 4, 4, generator=torch.Generator().manual_seed(1)))
    full, simulated, assignment = exported(Decoder, recipe, z, path)
    if why_not("onnxruntime", formats_used(recipe.enable, 3.0)):
        return
    found = load_engine("onnxruntime", path)(z=z)["dec"]
    # weights in blocks are decoded in fp16, by which a few codes of the next input round the other way
    blocks = any(FORMATS[layer.format].block for layer in assignment.values())
    assert relative_error(simulated, found) < (0.25 * relative_error(full, simulated) if blocks else 1e-3)
