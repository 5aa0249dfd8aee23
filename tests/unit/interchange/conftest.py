"""Recipes, and what targets write of tiny checkpoints."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from sd_quant.interchange.denoiser import QuantizedDenoiser
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from ..tiny import tiny  # noqa: F401 a fixture

PLAIN = {"smoothing": "none", "alpha": None}
ROTATED = PLAIN | {"per_token": True}
W4A8 = ROTATED | {"activation": "int8", "rotation": 256}
INT4_ROWS = ROTATED | {"per_channel": True, "rotation": 256}
PER_ROW_FP8 = PLAIN | {"per_channel": True, "per_token": True}
CASES = [  # of each format that is written and read: the format, the checkpoint, the weights and the recipe
    ("comfyui", "sdxl", "int8", {"per_token": True}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 16}),
    ("comfyui", "sdxl", "int8", {**ROTATED, "rotation": 4, "per_channel": False}),
    ("comfyui", "sd21", "fp8", {"per_channel": False}),
    ("comfyui", "sd3", "nvfp4", PLAIN | {"activation": None}),
    ("comfyui", "flux", "mxfp8", PLAIN | {"rounding": "gptq"}),
    ("comfyui", "pixart", "mxfp8", PLAIN),
    ("comfyui", "flux", "nvfp4", {"scale_search": True, **PLAIN}),
    ("comfyui", "sdxl", "int4", {"activation": None, "alpha": None}),
    ("comfyui", "flux", "int4_per_row", INT4_ROWS | {"rounding": "gptq", "scale_search": True}),
    ("comfyui", "sd3", "int4_in_int8", W4A8),
    ("diffusers_modelopt", "sd21", "int8", {"shift": True, "smoothing": "modelopt"}),
    ("diffusers_modelopt", "sd21", "fp8", {"per_channel": False}),
    ("diffusers_modelopt", "sd21", "int8", {"per_token": True}),
    ("diffusers_sdnq", "sd21", "int8", {"activation": None}),
    ("diffusers_sdnq", "sd21", "fp8", {"activation": None, "alpha": None, "per_channel": False}),
    ("diffusers_sdnq", "flux", "fp8", {"activation": None, "alpha": None, "per_channel": True}),
    ("diffusers_sdnq", "sd21", "int4", {"activation": None, "alpha": None, "rank": 0.1}),  # with convolutions in int8
    ("diffusers_sdnq", "sd3", "int8", {"alpha": None, "per_token": True}),  # whose inputs are fp16 here
    ("diffusers_autoround", "sd21", "int4", {"activation": None, "alpha": None}),
    ("diffusers_autoround", "flux", "int8", {"activation": None, "per_channel": False}),
    ("diffusers_torchao", "sd21", "int8", {}),
    ("diffusers_torchao", "flux", "int8", {"per_channel": False, "smoothing": "modelopt"}),
    ("diffusers_torchao", "sd3", "int8", {"per_token": True}),
    ("diffusers_torchao", "sd3", "int8", PLAIN | {"activation": None, "per_channel": True}),
    ("diffusers_torchao", "flux", "fp8", PER_ROW_FP8),
    ("diffusers_torchao", "sdxl", "fp8", PLAIN | {"per_channel": False}),  # with static inputs, which are by row here
    ("diffusers_bfl", "flux", "fp8", PER_ROW_FP8),
    ("diffusers_bfl", "sd3", "fp8", PLAIN | {"per_channel": False}),
    ("diffusers_bfl", "flux", "nvfp4", PLAIN | {"rounding": "gptq", "scale_search": True}),
    ("diffusers_nunchaku_lite", "flux", "int4", {"rank": 0.1}),
    ("diffusers_nunchaku_lite", "sd21", "int4", {"rank": 0.1, "smoothing": "modelopt"}),
    ("diffusers_nunchaku_lite", "flux", "nvfp4", {"rank": 0.1}),
    ("vllm_int8", "flux", "int8", PLAIN | {"per_token": True}),
    ("vllm_int8", "flux", "int8", {"per_channel": False}),  # smoothed, where that is folded
    ("sglang_fp8", "flux", "fp8_128x128", PLAIN | {"activation": "fp8_128"}),
    ("nunchaku", "sdxl_wide", "int4", {"rank": 0.1}),
    ("nunchaku", "sdxl_wide", "nvfp4", {"alpha": None, "smoothing": "none"}),
    ("nunchaku", "flux", "int4", {"rank": 0.1}),
    ("nunchaku", "flux", "nvfp4", {"rank": 0.1}),
    ("gguf", "sdxl", "int8", {"activation": None, "per_channel": False}),
    ("gguf", "sd21", "int4", {"activation": None, "alpha": None}),
    *(
        ("gguf", family, fmt, {"activation": None, "alpha": None, "scale_search": True, "rounding": "gptq"})
        for family, fmt in (("sdxl", "q4_k"), ("sd3", "q5_k"), ("flux", "q6_k"), ("sd21", "q4_1"))
    ),
    ("modelopt_export", "flux", "fp8", {"per_channel": False}),
    ("modelopt_export", "flux", "fp8", PER_ROW_FP8 | {"per_channel": False}),
    ("modelopt_export", "flux", "nvfp4", PLAIN | {"rounding": "gptq", "scale_search": True}),
]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def weights_of(candidate: QuantizedDenoiser) -> dict[str, Tensor]:
    found = {name: layer.weight.read() for name, layer in candidate.layers.items()}
    assert {name: each.dtype for name, each in found.items()} == {
        name: layer.weight.dtype for name, layer in candidate.layers.items()
    }
    return found


def recipe_of(name: str, activation: str | None = "same", **options: object) -> Recipe:
    """``name`` for weights, and for inputs unless told otherwise; where it is in blocks, convolutions are INT8."""
    pair = Pair(name, name if activation == "same" else activation)
    conv = pair if FORMATS[name].static_scale else Pair("int8", None)
    knobs = {"alpha": 0.8, "smoothing": "folded", "per_channel": name == "int8"} | options
    return Recipe(3.0, collect_method="min-max", enable=Enable(conv, pair, None), **knobs)


@pytest.fixture(scope="session")
def written_once(tiny, tmp_path_factory):  # noqa: F811
    """``written_once(target, family, format, **options)``: a tiny checkpoint, its assignment, and what is written."""

    @cache
    @torch.no_grad()
    def write(target: str, family: str, fmt: str, **options: object):
        case = tiny(family)
        assignment = case.assignment(recipe_of(fmt, **options), target)
        return case, assignment, case.written(assignment, target, tmp_path_factory.mktemp(target))

    return write
