"""Which targets take a preset, as far as its knobs say."""

from dataclasses import replace

import pytest
import yaml

from sd_quant.config.recipe import own_recipe, presets
from sd_quant.config.targets import executed_by, inputs_held
from sd_quant.interchange import AS_ASSIGNED, FP16, IN_BLOCKS, PER_ROW, STATIC, TARGETS

pytestmark = pytest.mark.commit

FILES = {name: yaml.safe_load(path.read_text(encoding="utf-8")) for name, path in presets().items()}


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
    assert executed_by(FILES["svdquant_w4a4"]) == ["diffusers_nunchaku_lite", "nunchaku"]
    assert {"modelopt_export", "comfyui", "diffusers_bfl"} <= set(executed_by(FILES["nvfp4"]))
    assert executed_by(FILES["rotated_w4a4"]) == executed_by(FILES["mxfp4"]) == []
    assert executed_by(FILES["mxfp8"]) == ["comfyui"] and executed_by(FILES["fp8_per_block"]) == ["sglang_fp8"]
    assert "gguf" not in executed_by(FILES["int8"]) and "gguf" in executed_by(FILES["int8_weight_only"])
