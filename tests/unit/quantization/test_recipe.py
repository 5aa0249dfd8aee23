import pytest

from sd_quant.quantization.recipe import QUANT_LEVELS, reason_kept


@pytest.mark.parametrize(
    "level, quantized",
    [(1, {"conv"}), (2, {"conv", "ffn"}), (2.5, {"conv", "ffn", "qkv"}), (3, {"conv", "ffn", "qkv", "linear"})],
)
def test_each_level_adds_one_role(level, quantized):
    assert {role for role in ("conv", "ffn", "qkv", "linear") if reason_kept(role, level) is None} == quantized


def test_the_reason_says_which_level_or_that_the_family_excludes_it():
    assert reason_kept("qkv", 2.0) == "role qkv is not in quant_level 2"
    assert {reason_kept("excluded", level) for level in QUANT_LEVELS} == {"excluded by the model family"}
