"""What a level quantizes, and the refusal of recipes that do not fit a model."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.quantization.recipe import QUANT_LEVELS, Enable, Pair, Recipe, check_layers, formats_used, reason_kept

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    "level, quantized, weights, attention",
    [
        (1, {"conv"}, {"int8"}, set()),
        (2, {"conv", "ffn"}, {"int8", "int4"}, set()),
        (2.5, {"conv", "ffn", "qkv"}, {"int8", "int4"}, set()),
        (3, {"conv", "ffn", "qkv", "linear"}, {"int8", "int4"}, set()),
        (4, {"conv", "ffn", "qkv", "linear"}, {"int8", "int4"}, {"fp8"}),
    ],
)
def test_each_level_adds_a_role_and_uses_the_formats_of_what_it_quantizes(level, quantized, weights, attention):
    assert {role for role in ("conv", "ffn", "qkv", "linear") if reason_kept(role, level) is None} == quantized
    found = formats_used(Enable(Pair("int8", "int8"), Pair("int4", None), "fp8"), level)
    assert found == {"weights": weights, "inputs": {"int8"}, "attention": attention}


def test_the_reason_says_which_level_or_that_the_family_excludes_it():
    assert reason_kept("qkv", 2.0) == "role qkv is not in quant_level 2"
    assert {reason_kept("excluded", level) for level in QUANT_LEVELS} == {"excluded by the model family"}


INT4 = Recipe(2.5, 0.5, enable=Enable(Pair("int4", None), Pair("int4", None), None), per_channel=False)
ROLES = {"conv_in": "excluded", "conv": "conv", "to_q": "qkv", "to_k": "qkv", "up": "ffn", "down": "ffn"}
ROTATED = Recipe(2.5, 0.5, per_token=True, rotation=64)


SHAPES = {name: (128, 6, 1, 1) if name.startswith("conv") else (128, 64) for name in ROLES} | {"down": (64, 96)}
NARROW = SHAPES | {"down": (64, 30)}
OF_TRANSFORMER = {"roles": ROLES | {"conv": "excluded"}}  # which embeds patches


@pytest.mark.parametrize(
    "recipe, given, reason",
    [
        (INT4, {"exclude": ["conv"]}, "^int4 has blocks of 64, which do not divide the 96 inputs of down"),
        (INT4, {"exclude": ["conv", "down"]}, None),
        (ROTATED, {"shapes": NARROW}, r"^quantize\.rotation is 64, and no power of 4 divides the 30 inputs of down"),
        (replace(ROTATED, rank=65), {}, r"^quantize\.rank is 65, expected at most 64, the shorter side of \w+; give a"),
        (replace(ROTATED, rank=64), {}, None),
        (Recipe(3.0, 0.8), {"exclude": ["*"]},
         r"^quantize.exclude matches all \d+ layers that quant_level=3 selects, exp"),
        (Recipe(1.0, 0.8), OF_TRANSFORMER, "^quant_level is 1, expected at least 2: all convolutions of this model"),
        (Recipe(4.0, 0.8), {}, "^quant_level is 4, expected at most 3: this model's attention is never"),
        (Recipe(4.0, 0.8), {"attentions": ["attn1"]}, None),
    ],
)  # fmt: skip
def test_a_recipe_that_does_not_fit_a_model_is_refused_before_anything_is_calibrated(recipe, given, reason):
    """``down`` has 96 inputs, of which 16 are rotated together. Convolutions are not rotated; theirs have 6."""
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        check_layers(**{"roles": ROLES, "shapes": SHAPES, "recipe": recipe} | given)
