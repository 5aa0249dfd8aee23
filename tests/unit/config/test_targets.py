"""Which targets take a preset, as far as its knobs say."""

from dataclasses import replace

import pytest

from sd_quant.config.recipe import own_recipe, presets
from sd_quant.config.targets import executed_by, inputs_held
from sd_quant.interchange import AS_ASSIGNED, FP16, IN_BLOCKS, PER_ROW, STATIC, TARGETS

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    "preset, target, how",
    [
        ("int8", "comfyui", PER_ROW),
        ("int8", "diffusers_torchao", STATIC),
        ("int8_dynamic", "diffusers_torchao", PER_ROW),
        ("int8", "gguf", FP16),
        ("int8_weight_only", "gguf", FP16),
        ("int8_weight_only", "comfyui", PER_ROW),  # which quantizes inputs whatever the recipe says
        ("int8_weight_only", "diffusers_torchao", FP16),
        ("fp8", "comfyui", STATIC),
        ("fp8_per_row", "comfyui", None),
        ("fp8_per_row", "diffusers_bfl", PER_ROW),
        ("nvfp4", "comfyui", AS_ASSIGNED),
        ("svdquant_w4a4", "nunchaku", IN_BLOCKS),
        ("svdquant_w4a16", "nunchaku", None),
        ("svdquant_w4a16", "gguf", None),  # which has no branch
        ("rotated_w4a4", "diffusers_sdnq", None),
        ("mxfp4", "comfyui", None),
        ("mxfp8", "comfyui", AS_ASSIGNED),
        ("fp8_per_block", "sglang_fp8", IN_BLOCKS),
        ("fp8_per_block", "modelopt_export", None),
        ("convrot_w4a4", "comfyui", PER_ROW),
        ("convrot_w4a8", "comfyui", PER_ROW),
        ("convrot_w4a8", "onnx", None),
        ("q4_k_weight_only", "gguf", FP16),
        ("q6_k_weight_only", "openvino", None),  # whose graph would hold fp16
    ],
)
def test_how_a_target_computes_a_preset(preset, target, how):
    assert inputs_held(TARGETS[target], own_recipe(preset)) == how


@pytest.mark.parametrize(("per_channel", "how"), [(False, STATIC), (True, None)])
def test_a_target_with_one_scale_for_a_weight_takes_no_other(per_channel, how):
    assert inputs_held(TARGETS["comfyui"], replace(own_recipe("fp8"), per_channel=per_channel)) == how


def test_presets_that_are_simulated_here_name_the_tools_that_execute_them():
    by = {name: executed_by(own_recipe(name)) for name in presets()}
    assert by["svdquant_w4a4"] == ["diffusers_nunchaku_lite", "nunchaku"]
    assert {"modelopt_export", "comfyui", "diffusers_bfl"} <= set(by["nvfp4"])
    assert by["rotated_w4a4"] == by["mxfp4"] == []
    assert by["mxfp8"] == ["comfyui"] and by["fp8_per_block"] == ["sglang_fp8"]
    assert "gguf" not in by["int8"] and "gguf" in by["int8_weight_only"]
