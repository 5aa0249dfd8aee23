import pytest

from sd_quant.quantization.recipe import QUANT_LEVELS, Enable, Pair, formats_used, reason_kept

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
