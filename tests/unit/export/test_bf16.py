"""Graphs whose weights are bf16: ONNX's own rules of types, and what OpenVINO computes of them."""

from dataclasses import replace

import onnx
import pytest
import torch
from diffusers import UNet2DConditionModel

from sd_quant.export.layer_cut import cut_attentions, cut_layers
from sd_quant.export.tracing import trace
from sd_quant.models.sdxl import NemoUnetPart
from tests.presets import recipe_of

from .network import POOLED, PREFIX, config

pytestmark = pytest.mark.slow  # the tracing
PRESETS = ["int8", "int8_dynamic", "fp8", "int8_weight_only", "svdquant_w4a16", "svdquant_w4a4", "rotated_w4a4", "convrot_w4a4", "mxfp8", "nvfp4", "q4_k_weight_only"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", params=DTYPES)
def in_dtype(request, network):
    contract = network.contract.in_dtype(DTYPES[request.param])
    return replace(network, contract=contract, traced=trace(lambda: NemoUnetPart(UNet2DConditionModel(**config()), POOLED), contract))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("smoothing", ["folded", "modelopt"])
def test_types_agree(in_dtype, tmp_path, preset, smoothing):
    recipe = recipe_of(preset, "quant_level=3")
    level, alpha = 4.0 if recipe.enable.attention else 3.0, 0.5 if recipe.alpha == "auto" else recipe.alpha
    recipe = replace(recipe, quant_level=level, alpha=alpha, branch_rounds=1)
    if recipe.smoothing != "none":
        recipe = replace(recipe, smoothing=smoothing)
    assignment = in_dtype.derive(recipe)
    path = in_dtype.write(tmp_path / "unet.onnx", assignment)
    layers = tmp_path / "layers.onnx"
    cut_layers(path, {n: l for n, l in assignment.items()}, layers, PREFIX, in_dtype.contract.weights)
    cut_attentions(path, [l for l in assignment.values() if l.attention_products], tmp_path / "att.onnx", in_dtype.contract.weights)
    for file in (path, layers):
        model = onnx.load(file)
        onnx.checker.check_model(model, full_check=True)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
