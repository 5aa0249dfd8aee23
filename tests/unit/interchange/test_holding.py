from dataclasses import replace

import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.interchange import AS_ASSIGNED, FP16, PER_ROW, STATIC, TARGETS
from sd_quant.interchange.holding import adapted, held, inputs_of
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import nvfp4

from .conftest import PLAIN
from .conftest import recipe_of as recipe_with

pytestmark = pytest.mark.commit

COMFYUI, MODELOPT = TARGETS["comfyui"], TARGETS["diffusers_modelopt"]


ROW = LayerAssignment(
    "down.attn1.to_q", "qkv", (64, 64), "int8", "int8", weight_axis=0, weight_amax=torch.ones(64), activation_amax=1.0
)


@pytest.mark.parametrize(
    "fmt, options, target, words",
    [
        ("int8", {}, replace(COMFYUI, formats={"fp8": STATIC}),
         r"comfyui holds fp8 and none of the layers in int8, [\w.]+, [\w.]+ and 104 more \(comfyui holds no weights in "
         r"int8\); hand over to another \(diffusers_modelopt holds 106, .*\), or a run with another quantize= preset"),
        ("fp8", {"per_channel": True}, COMFYUI, "none of the layers in fp8"),
        ("nvfp4", {**PLAIN, "rank": 4}, COMFYUI, "layers have a low-rank branch, which comfyui cannot hold"),
        ("int8", {**PLAIN, "per_token": True, "rotation": 16}, TARGETS["diffusers_torchao"],
         r"and none .* quantize\.rotation=0 rotates none; .* another \(openvino holds 106, onnx .*, comfyui holds 88,"),
    ],
    ids=["format", "scale", "branch", "rotation"],
)  # fmt: skip
def test_what_a_target_cannot_hold_at_all_is_refused(tiny, fmt, options, target, words):
    with pytest.raises(ConfigError, match=words):
        adapted(tiny("sdxl").derived(recipe_with(fmt, **options)), target)


LITE, IN_FP8, IN_ROWS = "diffusers_nunchaku_lite", {"format": "fp8"}, {"format": "int4_per_row"}
SOUND = dict.fromkeys(TARGETS, ROW) | {  # what a target holds, where that is not INT8
    LITE: replace(ROW, weight_shape=(128, 256), format="int4", activation_format="int4"),
    "nunchaku": replace(ROW, weight_shape=(128, 128), format="int4", activation_format="int4"),
    "modelopt_export": replace(ROW, weight_shape=(16, 32), weight_axis=None, format="nvfp4", activation_format="nvfp4"),
    "sglang_fp8": LayerAssignment("single_transformer_blocks.0.attn.to_q", "qkv", (256, 128), "fp8_128x128", "fp8_128"),
}


@pytest.mark.parametrize(
    "target, change, words",
    [
        ("diffusers_torchao", {"format": "int4"}, "holds no weights in int4"),
        ("diffusers_torchao", IN_FP8 | {"weight_shape": (64, 56)}, "in fp8 whose sides are multiples of 16"),
        ("comfyui", IN_FP8 | {"activation_format": None}, "wants a scale of the inputs of fp8"),
        ("diffusers_torchao", {"activation_format": "fp8"}, "and the recipe leaves them in fp8"),
        ("diffusers_torchao", {"weight_shape": (64, 64, 3, 3)}, "holds no convolutions in int8"),
        ("diffusers_torchao", {"activation_zero_point": 3}, "holds no inputs that are shifted"),
        ("diffusers_sdnq", {"pre_quant_scale": torch.ones(64)}, "cannot multiply the inputs of int8"),
        ("gguf", {"weight_shape": (64, 48)}, "whose inputs are a multiple of 32"),
        ("comfyui", IN_FP8 | {"activation_format": "fp8"}, "holds only one scale for a weight in fp8"),
        ("comfyui", {"format": "nvfp4", "name": "a.attentions.0.attn2.to_k"}, "reads the model's kind off the shape"),
        ("comfyui", {"format": "mxfp8", "name": "proj_out"}, "reads the model's kind off the shape"),
        ("onnx", {"format": "nvfp4"}, "has no kernel for nvfp4's FP4 numbers"),
        ("openvino", {"activation_format": "nvfp4"}, "whose scales are computed in blocks"),
        ("diffusers_modelopt", {"per_token": True}, "no inputs of int8 that are scaled per token; quantize.per_"),
        ("comfyui", IN_ROWS | {"activation_format": "int4_per_row"}, "rotates the inputs of int4_per_row"),
        ("comfyui", IN_ROWS | {"weight_shape": (64, 80), "rotation": 16}, "whose sides are multiples of 64"),
        ("comfyui", {"format": "nvfp4", "rotation": 16}, "comfyui holds no rotated weights in nvfp4; quantize.rotat"),
        ("modelopt_export", {"activation_format": None, "activation_amax": None}, "wants a scale of the inputs of"),
        ("modelopt_export", IN_FP8 | {"activation_format": "fp8", "weight_axis": 0}, "only one scale for a weight in"),
        ("modelopt_export", {"per_token": True}, "no inputs of nvfp4 that are scaled per token"),
        *(("nunchaku", {"name": name}, "leaves such layers") for name in (
            "a.attn2.to_k", "a.attn2.to_v", "a.proj_in", "a.proj_out", "time_embed.linear_1", "proj_out",
        )),
        (LITE, {"weight_shape": (128, 192)}, "multiples of 128"),
        (LITE, {"weight_shape": (192, 128)}, "multiples of 128"),
        (LITE, {"activation_format": None}, "inputs quantized in int4"),
        ("sglang_fp8", {"activation_format": None}, "inputs quantized in fp8_128, and the recipe leaves them in high"),
        ("sglang_fp8", {"activation_format": "mxfp8"}, "in fp8_128, and the recipe leaves them in mxfp8"),
    ],
)  # fmt: skip
def test_what_a_target_cannot_hold_stays_in_high_precision(target, change, words):
    sound = SOUND[target]
    assert held(sound, TARGETS[target]).format == sound.format
    found = held(replace(sound, **change), TARGETS[target])
    assert found.format is None and found.activation_format is None and words in found.reason
    assert not found.rotation and not found.per_token and found.weight_amax is None


SD3 = ("pos_embed.proj", "transformer_blocks.0.attn.add_q_proj")  # by which its layers are known
QKV = tuple(f"transformer_blocks.0.attn.to_{each}" for each in "qkv")


def joined(target: str, changes: dict, *ranges: float, **row: object) -> list[LayerAssignment]:
    """Query, key and value of an SD3 with these ranges, the value changed, as the target holds them."""
    rows = {name: replace(ROW, name=name, format=None, activation_format=None) for name in SD3}
    for name, amax in zip(QKV, ranges, strict=True):
        rows[name] = replace(ROW, name=name, weight_amax=torch.tensor([amax]), weight_axis=None, **row)
    rows[QKV[2]] = replace(rows[QKV[2]], **changes)
    rows["last"] = replace(ROW, name="last")
    found = adapted(rows, replace(TARGETS[target], formats=dict.fromkeys(("fp8", "int8", "nvfp4"), STATIC)))
    return [found[name] for name in QKV]


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_one_tensor_has_one_range_in_formats_that_have_one(fmt):
    """Else the scale of the last layer would multiply the codes of all."""
    found = joined("comfyui", {"activation_amax": 2.0}, 1.0, 4.0, 2.0, format=fmt, activation_format=fmt)
    assert [(row.format, row.weight_amax.tolist(), row.activation_amax) for row in found] == [(fmt, [4.0], 2.0)] * 3
    apart = joined("diffusers_modelopt", {"activation_amax": 2.0}, 1.0, 4.0, 2.0, format=fmt, activation_format=fmt)
    assert [(row.weight_amax.item(), row.activation_amax) for row in apart] == [(1.0, 1.0), (4.0, 1.0), (2.0, 2.0)]
    by_row = joined("comfyui", {}, 1.0, 4.0, 2.0)
    assert [row.weight_amax.item() for row in by_row] == [1.0, 4.0, 2.0]


@torch.no_grad()
def test_codes_that_were_chosen_stay_with_scales_of_another_range():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    ranges = [weight.abs().max().item() * factor for factor in (1.0, 1.7, 1.0)]
    chosen = {}
    for amax in set(ranges):
        scales = nvfp4.scales(weight, torch.tensor([amax]))
        chosen[amax] = (nvfp4.quantize(weight, *scales), *scales)
    fmt = {"format": "nvfp4", "activation_format": "nvfp4"}
    query, key, value = joined("comfyui", {"rounded": chosen[ranges[2]]}, *ranges, **fmt)
    assert query.rounded is None and torch.equal(value.rounded[0], chosen[ranges[0]][0])
    assert value.rounded[2] == nvfp4.global_scale(key.weight_amax) == nvfp4.global_scale(torch.tensor(ranges))
    assert torch.equal(value.rounded[1], value.rounded[1].to(torch.float8_e4m3fn).float())
    before, after = (relative_error(weight, nvfp4.dequantize(*each)) for each in (chosen[ranges[0]], value.rounded))
    assert before < after < 1.15 * before
    ratio = value.rounded[1] * value.rounded[2] / (chosen[ranges[2]][1] * chosen[ranges[2]][2])
    assert 0 < (ratio - 1).abs().max() <= 1 / 16


@pytest.mark.parametrize(
    "target, changes, words",
    [
        ("comfyui", {"format": None, "activation_format": None, "reason": "kept"}, "joins it with layers in other"),
        ("gguf", {"format": "nvfp4", "activation_format": "nvfp4"}, "joins it with layers in other formats"),
        ("comfyui", {"rotation": 16}, "joins it with layers in other formats"),
        ("comfyui", {"format": "nvfp4", "activation_format": "nvfp4", "pre_quant_scale": torch.full((64,), 2.0)},
         "whose inputs are multiplied by another vector; smoothing=folded"),
    ],
)  # fmt: skip
def test_one_tensor_has_one_format_or_none(target, changes, words):
    both = {"format": "nvfp4", "activation_format": "nvfp4"} if "pre_quant_scale" in changes else {}
    found = joined(target, changes, 1.0, 1.0, 1.0, **both)
    assert [row.format for row in found] == [None] * 3 and words in found[0].reason
    assert found[2].reason == "kept" if changes.get("reason") else words in found[2].reason


def test_a_shift_goes_with_the_inputs():
    """The weight of a shifted convolution is held where inputs are not, with the convolution's own bias."""
    row = LayerAssignment(
        "conv1", "conv", (8, 8, 3, 3), "int8", "int8", weight_axis=0, weight_amax=torch.ones(8), activation_amax=1.0,
        activation_zero_point=3, bias=torch.ones(8),
    )  # fmt: skip
    found = held(row, TARGETS["diffusers_sdnq"])
    assert (found.format, found.activation_format, found.activation_zero_point, found.bias) == ("int8", None, 0, None)


@pytest.mark.parametrize("target, kept", [("diffusers_modelopt", None), ("openvino", "int8"), ("onnx", "int8")])
def test_attention_is_held_by_graphs_alone(target, kept):
    row = LayerAssignment(
        "down.attn1", "attention", (), activation_format="int8", attention_amax=(torch.ones(1),) * 4,
        key_mean=torch.zeros(1, 4),
    )  # fmt: skip
    found = held(row, TARGETS[target])
    assert found.activation_format == kept and (found.attention_amax is None) == (kept is None)
    assert (found.reason is None) == (kept is not None)


@pytest.mark.parametrize(
    "target, per_token, how",
    [
        ("diffusers_torchao", True, PER_ROW), ("diffusers_torchao", False, STATIC),
        ("comfyui", True, PER_ROW), ("comfyui", False, PER_ROW),
        ("diffusers_sdnq", True, FP16), ("gguf", True, FP16),
        ("openvino", True, AS_ASSIGNED), ("onnx", True, AS_ASSIGNED),
    ],
)  # fmt: skip
def test_inputs_that_are_scaled_per_token_are_computed_in_the_consumers_way(target, per_token, how):
    found = held(replace(ROW, per_token=per_token), TARGETS[target])
    assert found.format == "int8" and inputs_of(found, TARGETS[target]) == how
    assert found.per_token == (per_token and how != FP16 and target != "comfyui")


def test_a_branch_that_is_not_held_is_refused_where_every_linear_has_one_and_left_out_of_a_mix(tiny):
    rows = tiny("sdxl").derived(recipe_with("int8", **PLAIN, rank=4))
    with pytest.raises(ConfigError, match="layers have a low-rank branch, which diffusers_modelopt cannot hold"):
        adapted(rows, MODELOPT)
    name = next(name for name, row in rows.items() if row.low_rank is not None)
    found = adapted(rows | {name: replace(rows[name], low_rank=None)}, MODELOPT)
    assert found[name].format == "int8" and {
        row.reason for other, row in found.items() if rows[other].low_rank is not None and other != name
    } == {"diffusers_modelopt holds no low-rank branch"}
