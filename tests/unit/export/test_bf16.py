"""Graphs of bf16 and of fp32: ONNX's own rules of types, and the precision in which quantized layers compute.

``fp32`` differs from fp16 by its types alone. All presets were written so once; those here have all forms of layers.
"""

from dataclasses import replace
from functools import cache, partial

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from diffusers import UNet2DConditionModel
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.engines import load_engine, why_not
from sd_quant.engines.openvino import load
from sd_quant.export.layer_cut import cut_attentions, cut_layers
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.models.parts import Contract, SharedInput
from sd_quant.models.roles import roles_of
from sd_quant.models.sdxl import NemoUnetPart
from sd_quant.models.sdxl_nemo import unet_config
from sd_quant.numbers import relative_error
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import formats_used
from sd_quant.simulation.modelopt import simulate
from tests.graphs import stored_in
from tests.layers import drawn, static_layer
from tests.presets import recipe_of

from .conftest import CONFIG, POOLED, PREFIX, at_highest_level, exported

pytestmark = pytest.mark.commit

WIDTH = 256
CONTRACT = Contract({"z": ("batch", WIDTH, 4, 4)}, ("dec",), {"z": torch.float32}, torch.float32)


@pytest.fixture(scope="module")
def in_dtype(network):
    @cache
    def traced(dtype: torch.dtype):
        contract = network.contract.in_dtype(dtype)
        graph = trace(lambda: NemoUnetPart(UNet2DConditionModel(**unet_config(CONFIG)), POOLED), contract)
        return replace(network, contract=contract, traced=graph)

    return traced


@pytest.mark.nightly  # three networks are traced
@pytest.mark.parametrize("preset, dtype", [
    ("int8", torch.bfloat16),  # with shifted convolutions and attention in integers
    ("int8", torch.float32), ("fp8", torch.bfloat16),  # with attention in a floating-point format
    ("svdquant_w4a4", torch.bfloat16),  # multiplied and in blocks, beside a branch
    ("svdquant_w4a16", torch.bfloat16),  # the same of weights alone
])  # fmt: skip
def test_types_agree_and_scales_are_not_rounded(in_dtype, tmp_path, preset, dtype):
    recipe = at_highest_level(preset, branch_rounds=0, smoothing="none" if preset == "fp8" else "modelopt")
    made = exported(in_dtype(dtype), recipe, tmp_path / "a.onnx")
    layers, attentions = tmp_path / "layers.onnx", tmp_path / "attentions.onnx"
    cut_layers(made.path, made.assignment, layers, PREFIX, dtype)
    cut_attentions(made.path, made.attentions.values(), attentions, dtype)
    for file in (made.path, layers, attentions)[: 3 if made.attentions else 2]:
        model = onnx.load(file)
        onnx.checker.check_model(model, full_check=True)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    stored = stored_in(made.path)
    for name, layer in made.layers.items():
        for end, number in (("input_scale", layer.activation_scale), ("input_shift", layer.shift)):
            if number and f"{name}.{end}" in stored:
                assert numpy_helper.to_array(stored[f"{name}.{end}"]) == torch.tensor(number).numpy()
        if layer.activation_zero_point:
            assert stored[f"{name}.shifted_bias"].data_type == TensorProto.FLOAT
    kinds = {stored[name].data_type for name in stored if name.endswith(".conv_in.weight")}
    assert kinds == {TensorProto.BFLOAT16 if dtype == torch.bfloat16 else TensorProto.FLOAT}


@pytest.mark.parametrize("activation", ["int8", None])
def test_a_layer_in_bf16_has_the_scales_of_its_assignment(tmp_path, activation):
    """bf16 would round both scales up by 0.39 %, and the output with them by 0.8 %."""
    weight, bias, x = drawn(8, 16), drawn(8, seed=1).bfloat16(), drawn(64, 16, seed=2).bfloat16()
    rounded_down = 127 * (1 + 2**-8 - 2**-11)  # a scale just below the middle of two numbers of bf16
    weight = weight * rounded_down / 2**6 / weight.abs().max()
    layer = replace(static_layer(weight, "int8", False, rounded_down / 2**5), activation_format=activation)
    model = ir.from_proto(onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22]> graph (bfloat16[n,16] x, bfloat16[8,16] weight, bfloat16[8] bias) => '
        "(bfloat16[n,8] y) { t = Transpose <perm = [1, 0]> (weight) product = MatMul (x, t) y = Add (product, bias) }"
    ))  # fmt: skip
    for value in model.graph.inputs[1:]:
        value.name = f"layer.{value.name}"
    path, stored = tmp_path / "a.onnx", {"layer.weight": weight, "layer.bias": bias}
    write_onnx(model, path, inputs=1, read=stored.__getitem__, assignment={"layer": layer})
    onnx.checker.check_model(onnx.load(path), full_check=True)
    found = load(path, threads=1)(x=x)["y"]
    expected = (layer.rounded_input(x) if activation else x.float()) @ layer.rounded_weight(weight).T + bias
    assert found.dtype == torch.bfloat16 and relative_error(expected, found.float()) < 3e-3
    # Without AVX-512, OpenVINO cuts some results off to bf16 and rounds others: each may be either
    rounded, cut_off = expected.bfloat16().float(), (expected.view(torch.int32) & ~0xFFFF).view(torch.float32)
    result = found.float()
    nearest = torch.where((result - rounded).abs() < (result - cut_off).abs(), rounded, cut_off)
    assert abs(((result - nearest) * nearest).sum() / nearest.square().sum()) < 1e-3  # a common factor


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.einsum("bnc->bcn", x * self.weight)  # ONNX's Einsum takes no bf16


@pytest.mark.slow  # the tracing
def test_an_operation_that_onnx_has_no_bf16_for_is_in_fp32(tmp_path):
    contract = Contract({"x": ("batch", 5, 3)}, ("y",), {"x": torch.bfloat16}, torch.bfloat16, example={"batch": 2})
    path = tmp_path / "a.onnx"
    write_onnx(trace(Joins, contract), path, inputs=1, read=lambda name: torch.ones(3), assignment={})
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = drawn(2, 5, 3).bfloat16()
    assert torch.equal(load(path, threads=1)(x=x)["y"], x.transpose(1, 2))


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


@pytest.mark.slow
@pytest.mark.parametrize("preset, make", [
    *((preset, Decoder) for preset in ("int8", "int8_dynamic", "fp8", "convrot_w4a4", "mxfp8")),
    *(pytest.param(name, Decoder, marks=pytest.mark.nightly) for name in ("svdquant_nvfp4", "q4_k_weight_only")),
    *((preset, partial(Projection, bias)) for preset in ("int8_weight_only", "int8_dynamic") for bias in (True, False)),
])  # fmt: skip
def test_a_part_in_fp32_computes_what_the_simulation_does(preset, make, tmp_path):
    """As decoders and T5: codes are the same, and all that is no code is fp32. A linear may end the graph."""
    recipe, path = recipe_of(preset, "quant_level=3"), tmp_path / "vae.onnx"
    z = nn.functional.silu(drawn(2, WIDTH, 4, 4, seed=1))
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    roles = roles_of(network, ())
    layers = {name: network.get_submodule(name) for name in roles}
    with collect(network, layers, [0, 1], 1, lambda: (0, [0, 1]), draw(layers, [0, 1], 1, 0)) as statistics:
        full = network(z=z)
    assignment = derive(
        roles, lambda name: layers[name].weight, statistics.layers, recipe,
        [SharedInput((name,)) for name in roles if name != "conv"], bias_of=lambda name: layers[name].bias,
    )  # fmt: skip
    write_onnx(trace(make, CONTRACT), path, inputs=1, read=network.state_dict().__getitem__, assignment=assignment)
    onnx.checker.check_model(path, full_check=True)
    simulated = simulate(network, assignment)(z)
    if why_not("onnxruntime", formats_used(recipe.enable, 3.0)):
        return
    found = load_engine("onnxruntime", path)(z=z)
    assert list(found) == ["dec"]
    # weights in blocks are decoded in fp16, by which a few codes of the next input round the other way
    blocks = any(FORMATS[layer.format].block for layer in assignment.values())
    error = relative_error(simulated, found["dec"])
    assert error < (0.25 * relative_error(full, simulated) if blocks else 1e-3)
