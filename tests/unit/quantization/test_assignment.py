"""What a recipe quantizes and refuses, and what codes of inputs that are scaled token by token stand for."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.interchange.comfyui_marks import INT4, INT8
from sd_quant.interchange.inputs import Rotated
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, weights_alone
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import QUANT_LEVELS, Enable, Pair, Recipe, check_layers, formats_used, reason_kept
from sd_quant.stages.export_onnx import assignment_digest
from tests.layers import drawn, statistics_of
from tests.presets import recipe_of

pytestmark = pytest.mark.commit

# 1 / 127 becomes 0.0078735 in fp16, which is 7e-5 less: so much smaller is every number that a code stands for, and a
# code of a number so near to halfway between two that 7e-5 of it decide is the next.
OF_FP16 = 1e-4


def tokens(rows: int = 64, width: int = 96) -> Tensor:
    return drawn(rows, width) * 2.0 ** torch.linspace(-8, 8, rows)[:, None]


def per_token(fmt: str = "int8", rotation: int = 0) -> LayerAssignment:
    return LayerAssignment("layer", "ffn", (8, 96), fmt, fmt, activation_amax=1.0, per_token=True, rotation=rotation)


def test_codes_of_a_token_are_those_of_the_published_rule():
    """Scale max |token| / 127 and the nearest code (torchao's, quantize_int8_rowwise of comfy-kitchen)."""
    x, layer = tokens(), per_token()
    scale = x.abs().amax(-1, keepdim=True) / 127
    expected = (x / scale).round()
    found = layer.rounded_input(x) / scale / (layer.activation_scale * 127)
    torch.testing.assert_close(found, found.round(), rtol=1e-5, atol=1e-5)
    assert (found.round() - expected).abs().max() <= 1 and (found.round() == expected).float().mean() > 0.99
    assert torch.equal(found.abs().amax(-1).round(), torch.full((len(x),), 127.0))
    torch.testing.assert_close(INT8(x), expected * scale)
    same = found.round() == expected
    torch.testing.assert_close(layer.rounded_input(x)[same], INT8(x)[same], rtol=OF_FP16, atol=0)


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_what_one_token_is_changes_no_other(fmt):
    x, layer = tokens(), per_token(fmt)
    before = layer.rounded_input(x)
    x[3] *= 1000
    x[5] = 0
    after = layer.rounded_input(x)
    others = [row for row in range(len(x)) if row not in (3, 5)]
    assert torch.equal(after[others], before[others])
    torch.testing.assert_close(after[3], 1000 * before[3])
    assert torch.equal(after[5], torch.zeros(96))


@pytest.mark.parametrize(("fmt", "read"), [("int8", INT8), ("int4_per_row", INT4)])
def test_rotated_tokens_are_those_that_comfyui_rounds(fmt, read):
    """``interchange`` holds what is read of its files against comfy-kitchen, bit for bit."""
    x = tokens()
    assert relative_error(Rotated(read, 16)(x), per_token(fmt, 16).rounded_input(x)) < 0.02
    assert relative_error(x, per_token(fmt, 16).rounded_input(x)) > 0.005


WEIGHTS_ALONE = [  # a preset, its twin that quantizes weights alone, and knobs by which both choose the same codes
    ("int8", "int8_weight_only", ["smoothing=none"]),
    ("int8_dynamic", "int8_weight_only", ["smoothing=none"]),
    ("mxfp4", "mxfp4_weight_only", []),
    ("svdquant_w4a4", "svdquant_w4a16", ["quantize.rank=8", "quantize.branch_rounds=1"]),
]


@pytest.mark.parametrize(("preset", "twin", "knobs"), WEIGHTS_ALONE)
def test_a_step_with_unquantized_inputs_is_the_preset_of_weights_alone(preset, twin, knobs):
    """All engines compute what an assignment says, and the rows of both are one, but for a range that nothing reads."""
    weights = {"ffn": drawn(64, 64), "conv": drawn(64, 64, 3, 3)}
    seen = {"ffn": statistics_of(drawn(64, 64)), "conv": replace(statistics_of(drawn(64, 64 * 9)), kind="conv")}
    seen["conv"].amax = torch.full((2, 1), 4.0)
    own, other = (
        derive(
            {"ffn": "ffn", "conv": "conv"}, weights.__getitem__, seen, recipe_of(each, "quant_level=3", *knobs),
            [SharedInput(("ffn",))], bias_of=lambda name: torch.zeros(64),
        )
        for each in (preset, twin)
    )  # fmt: skip
    digests = [
        assignment_digest({name: replace(layer, activation_amax=None) for name, layer in each.items()})
        for each in (weights_alone(own), other, own)
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("level, quantized, weights, attention", [
    (1, {"conv"}, {"int8"}, set()),
    (2, {"conv", "ffn"}, {"int8", "int4"}, set()),
    (2.5, {"conv", "ffn", "qkv"}, {"int8", "int4"}, set()),
    (3, {"conv", "ffn", "qkv", "linear"}, {"int8", "int4"}, set()),
    (4, {"conv", "ffn", "qkv", "linear"}, {"int8", "int4"}, {"fp8"}),
])  # fmt: skip
def test_each_level_adds_a_role_and_uses_the_formats_of_what_it_quantizes(level, quantized, weights, attention):
    assert {role for role in ("conv", "ffn", "qkv", "linear") if reason_kept(role, level) is None} == quantized
    found = formats_used(Enable(Pair("int8", "int8"), Pair("int4", None), "fp8"), level)
    assert found == {"weights": weights, "inputs": {"int8"}, "attention": attention}
    assert reason_kept("qkv", 2.0) == "role qkv is not in quant_level 2"
    assert {reason_kept("excluded", level) for level in QUANT_LEVELS} == {"excluded by the model family"}


WEIGHTS_OF_4 = Recipe(2.5, 0.5, enable=Enable(Pair("int4", None), Pair("int4", None), None), per_channel=False)
ROLES = {"conv_in": "excluded", "conv": "conv", "to_q": "qkv", "to_k": "qkv", "up": "ffn", "down": "ffn"}
ROTATED = Recipe(2.5, 0.5, per_token=True, rotation=64)
SHAPES = {name: (128, 6, 1, 1) if name.startswith("conv") else (128, 64) for name in ROLES} | {"down": (64, 96)}
NARROW = SHAPES | {"down": (64, 30)}


@pytest.mark.parametrize("recipe, given, reason", [
    (WEIGHTS_OF_4, {"exclude": ["conv"]}, "^int4 has blocks of 64, which do not divide the 96 inputs of down"),
    (WEIGHTS_OF_4, {"exclude": ["conv", "down"]}, None),
    (ROTATED, {"shapes": NARROW}, r"^quantize\.rotation is 64, and no power of 4 divides the 30 inputs of down"),
    (replace(ROTATED, rank=65), {}, r"^quantize\.rank is 65, expected at most 64, the shorter side of \w+; give a"),
    (replace(ROTATED, rank=64), {}, None),
    (Recipe(3.0, 0.8), {"exclude": ["*"]},
     r"^quantize.exclude matches all \d+ layers that quant_level=3 selects, exp"),
    (Recipe(1.0, 0.8), {"roles": ROLES | {"conv": "excluded"}},  # of a transformer, where it embeds patches
     "^quant_level is 1, expected at least 2: all convolutions of this model"),
    (Recipe(4.0, 0.8), {}, "^quant_level is 4, expected at most 3: this model's attention is never"),
    (Recipe(4.0, 0.8), {"attentions": ["attn1"]}, None),
])  # fmt: skip
def test_a_recipe_that_does_not_fit_a_model_is_refused_before_anything_is_calibrated(recipe, given, reason):
    """``down`` has 96 inputs, of which 16 are rotated together. Convolutions are not rotated; theirs have 6."""
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        check_layers(**{"roles": ROLES, "shapes": SHAPES, "recipe": recipe} | given)
