"""What is handed over, read back as a candidate without the consumers' packages, computes what the simulation does.

``tests/unit/interchange`` holds the readers against those packages, bit for bit; ``test_consumers`` has them load some.
"""

import pytest
import torch

from sd_quant.checkpoints.nemo_networks import parameter_shapes, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.interchange import write_comfyui as comfyui
from sd_quant.models.sdxl_nemo import build_modules
from sd_quant.names.nemo import PREFIX, SAME, locations
from sd_quant.names.sgm import nemo_key, sgm_names

from .conftest import layer_errors, recipe_of

SGM = "model.diffusion_model."
PLAIN = {"smoothing": "none", "alpha": None}
ROTATED = PLAIN | {"per_token": True}
CASES = [
    ("comfyui", "sdxl", "fp8", {"per_channel": False}),
    ("comfyui", "sdxl", "int8", {"per_token": True}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 16}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 4, "per_channel": False}),
    ("comfyui", "sdxl", "nvfp4", PLAIN),
    ("diffusers_modelopt", "sd21", "int8", {"shift": True, "smoothing": "modelopt"}),
    ("diffusers_modelopt", "sd21", "fp8", {"per_channel": False}),
    ("diffusers_modelopt", "sd21", "int8", {"per_token": True}),
    ("diffusers_sdnq", "sd21", "int8", {"activation": None}),
    ("diffusers_sdnq", "sd21", "fp8", {"activation": None, "alpha": None, "per_channel": False}),
    ("diffusers_sdnq", "flux", "fp8", {"activation": None, "alpha": None, "per_channel": True}),
    ("diffusers_sdnq", "sd21", "int4", {"activation": None, "alpha": None, "rank": 0.1}),  # with convolutions in int8
    ("diffusers_sdnq", "sd3", "int8", {"alpha": None, "per_token": True}),  # whose inputs are fp16 here
    ("diffusers_torchao", "sd21", "int8", {}),
    ("diffusers_torchao", "flux", "int8", {"per_channel": False, "smoothing": "modelopt"}),
    ("diffusers_torchao", "sd3", "int8", {"per_token": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("target, family, fmt, options", CASES)
def test_each_layer_computes_what_the_simulation_does(tiny, tmp_path, target, family, fmt, options):
    case = tiny(family)
    assignment = case.assignment(recipe_of(fmt, **options), target)
    folder = case.written(assignment, target, tmp_path)
    candidate = case.read(folder / comfyui.FILE if target == "comfyui" else folder, target)
    held = [layer for layer in assignment.values() if layer.format]
    assert candidate.layers.keys() == {layer.name for layer in held} and held
    if "shift" in options:
        told = " ".join(str(layer.inputs) for layer in candidate.layers.values())
        assert any(layer.activation_zero_point for layer in held) and "smoothed" in told and "shift" in told
    errors = layer_errors(case, case.simulated(assignment, target), case.network(candidate), assignment)
    assert max(errors.values()) < (5e-4 if target == "diffusers_modelopt" else 1e-5)  # whose weights are read in fp16


def test_full_size_keys_are_those_that_sgm_is_read_by():
    with torch.device("meta"):
        modules = build_modules(sdxl_base_config(), CLIP_L, OPEN_CLIP_BIGG)
    names = list(parameter_shapes(modules)["unet"])
    found = sgm_names(names)
    places = locations("unet", names)
    assert len(set(found.values())) == len(names) == 1680
    assert all(nemo_key(SGM + key) == places[name].key for name, key in found.items())
    assert {place.layout for place in places.values()} == {SAME} and PREFIX["unet"] == f"model.{SGM}"
    assert found["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.2.conv.weight"
    assert found["add_embedding.linear_1.weight"] == "label_emb.0.0.weight"  # both tell ComfyUI-GGUF that this is SDXL
    norm = "mid_block.attentions.0.transformer_blocks.9.norm3.bias"
    assert found[norm] == "middle_block.1.transformer_blocks.9.norm3.bias"
    assert max(map(len, found.values())) <= 127  # ggml's longest name of a tensor
