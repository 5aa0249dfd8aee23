"""diffusers with ModelOpt restores what is written: quantizers in place, and outputs bit for bit."""

import pytest
import torch
from diffusers import UNet2DConditionModel

from sd_quant.checkpoints.tensors import lazy
from sd_quant.hand_over.diffusers_modelopt import of_codes
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from .conftest import layer_errors, network_error

TARGET = "diffusers_modelopt"


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_a_weight_of_codes_gives_the_same_codes(assign, calibrated, fmt):
    rows, unet = assign(fmt, fmt, per_channel=fmt == "int8"), calibrated.part().unet
    for layer in (layer for layer in rows.values() if layer.format is not None):
        weight = unet.get_submodule(layer.name).weight
        codes, scales = layer.codes_and_scales(rewritten(weight, layer))
        stored = of_codes(lazy(weight), layer).read().float()
        assert torch.equal(FORMATS[fmt].quantize(stored, *scales).float(), codes.float()), layer.name


@pytest.mark.consumer
@pytest.mark.parametrize("fmt, options", [("int8", {"shift": True, "smoothing": "modelopt"}), ("fp8", {})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_and_the_network_are_the_simulation(tiny, tmp_path, fmt, options, dtype):
    """In either dtype, because ranges are fp16's numbers; in fp32 then, so that nothing else differs."""
    pytest.importorskip("accelerate")
    import modelopt.torch.opt as mto

    mto.enable_huggingface_checkpointing()
    case, pair = tiny("sdxl"), Pair(fmt, fmt)
    recipe = Recipe(
        3.0, 0.8, collect_method="min-max", enable=Enable(pair, pair, None), per_channel=fmt == "int8", **options
    )
    assignment = case.assignment(recipe, TARGET)
    folder = case.written(assignment, TARGET, tmp_path)
    theirs = UNet2DConditionModel.from_pretrained(folder / case.component, torch_dtype=dtype).eval().float()
    simulated = case.simulated(assignment, TARGET)
    assert sum(layer.format is not None for layer in assignment.values()) > 20
    assert fmt == "fp8" or any(layer.activation_zero_point for layer in assignment.values())
    assert max(layer_errors(case, simulated, theirs, assignment).values()) < 1e-5
    assert network_error(case, simulated, theirs) < 1e-5


@pytest.mark.consumer
def test_linears_whose_inputs_are_scaled_per_token_stay_in_high_precision(tiny, tmp_path):
    pytest.importorskip("accelerate")
    import modelopt.torch.opt as mto

    mto.enable_huggingface_checkpointing()
    case = tiny("sdxl")
    assignment = case.assignment(Recipe(3.0, 0.8, collect_method="min-max", per_token=True), TARGET)
    assert {row.role for row in assignment.values() if row.format is not None} == {"conv"}
    folder = case.written(assignment, TARGET, tmp_path)
    theirs = UNet2DConditionModel.from_pretrained(folder / case.component, torch_dtype=torch.float32).eval()
    assert network_error(case, case.simulated(assignment, TARGET), theirs) < 1e-5
