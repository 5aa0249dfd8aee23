import pytest

from sd_quant.quantization.recipe import QUANT_LEVELS, Enable, Pair, formats_used, reason_kept


@pytest.mark.parametrize(
    "level, quantized",
    [(1, {"conv"}), (2, {"conv", "ffn"}), (2.5, {"conv", "ffn", "qkv"}), (3, {"conv", "ffn", "qkv", "linear"})],
)
def test_each_level_adds_one_role(level, quantized):
    assert {role for role in ("conv", "ffn", "qkv", "linear") if reason_kept(role, level) is None} == quantized


def test_the_reason_says_which_level_or_that_the_family_excludes_it():
    assert reason_kept("qkv", 2.0) == "role qkv is not in quant_level 2"
    assert {reason_kept("excluded", level) for level in QUANT_LEVELS} == {"excluded by the model family"}


@pytest.mark.parametrize(
    "level, weights, inputs, attention",
    [
        (1, {"int8"}, {"int8"}, set()),
        (2, {"int8", "int4"}, {"int8"}, set()),
        (3, {"int8", "int4"}, {"int8"}, set()),
        (4, {"int8", "int4"}, {"int8"}, {"fp8"}),
    ],
)
def test_a_level_uses_the_formats_of_what_it_quantizes(level, weights, inputs, attention):
    found = formats_used(Enable(Pair("int8", "int8"), Pair("int4", None), "fp8"), level)
    assert found == {"weights": weights, "inputs": inputs, "attention": attention}
