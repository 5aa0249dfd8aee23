"""Which formats and knobs of a recipe go together."""

import dataclasses

import pytest

from sd_quant.config import QuantizeJob, check_enabled
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from sd_quant.quantization.recipe import Pair

from .composition import composed

ADAPTIVE = ("int8_dynamic", "rotated_w4a4")


def test_level_4_takes_a_format_for_attention():
    sentence = (
        "quant_level is 4.0, expected at most 3, because int8_per_tensor has no format for attention's matrix "
        "products; quantize=fp8 and quantize=int8 have"
    )
    with pytest.raises(ConfigError) as refusal:
        read(QuantizeJob, composed("quantize", "quantize=int8_per_tensor", "quant_level=4"))
    assert str(refusal.value) == sentence
    for preset in ("fp8", "int8"):
        assert read(QuantizeJob, composed("quantize", f"quantize={preset}", "quant_level=4")).quantize.quant_level == 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["quantize=nvfp4", "infer=torch_native"], "infer.engine is torch_native, expected another, such as"),
        (
            ["quantize.budget=0.4", "infer=torch_native"],
            "quantize.budget is 0.4, expected null, because infer.engine=torch_native multiplies codes with codes",
        ),
        (
            ["quantize.rank=8", "infer=torch_native"],
            "quantize.rank is 8, expected 0, because infer.engine=torch_native",
        ),
        (["quantize=fp8", "alpha=0.5"], "alpha is 0.5, expected null, because fp8 smooths nothing"),
        (
            ["quantize=int8", "quantize.format=fp8"],
            "quantize.format is fp8, expected the name of the preset that",
        ),
        (
            ["quantize=mxfp4", "quantize.per_channel=true"],
            "quantize.per_channel is True, expected false, because",
        ),
        (
            ["quantize=int8_weight_only", "percentile=0.5"],
            "percentile is 0.5, expected 1, because int8_weight",
        ),
        (
            ["quantize=int8_weight_only", "collect_method=min-max"],
            "collect_method is min-max, expected mean-max, bec",
        ),
        (
            ["quantize=svdquant_w4a4", "quantize.observer=mse"],
            "quantize.observer is mse, expected min_max, because",
        ),
        (
            ["quantize=fp8", "quantize.shift=true"],
            "quantize.shift is True, expected false, because fp8 is more precise near zero than far from it, so a",
        ),
        (
            ["quantize=svdquant_w4a4", "quantize.shift=true"],
            "quantize.shift is True, expected false, because svdquant_w4a4 leaves the inputs of convolutions alone",
        ),
        (
            ["quantize=int8_per_tensor", "quantize.shift=true"],
            "quantize.shift is True, expected false without quantize.per_channel, because fp16 would round away a",
        ),
        (
            ["quantize=int4_w4a4", "quantize.per_token=true"],
            "quantize.per_token is True, expected false, because int4_w4a4 has scales per block",
        ),
        (
            ["quantize=int8_weight_only", "quantize.per_token=true"],
            "quantize.per_token is True, expected false, because int8_weight_only leaves the inputs of linears alone",
        ),
        (
            ["quantize=int8_weight_only", "quantize.rotation=64"],
            "quantize.rotation is 64, expected 0, because int8_weight_only leaves the inputs of linears alone",
        ),
        (
            ["quantize=int8", "quantize.rotation=16"],
            "quantize.rotation is 16, expected 0 without quantize.per_token, because how large a rotated input gets "
            "was not calibrated",
        ),
        (
            ["quantize=svdquant_w4a4", "quant_level=4"],
            "quant_level is 4.0, expected at most 3, because svdquant",
        ),
        (
            ["quantize=fp8", "trt.targets=[SM80,SM89]"],
            "trt.targets is SM80, expected one of SM89, SM120, SM121",
        ),
        (
            ["quantize=nvfp4", "trt.targets=[SM89]"],
            "trt.targets is SM89, expected one of SM120, SM121, because",
        ),
        (
            ["quantize=int4_w4a4", "trt.targets=[SM75]"],
            "trt.targets is SM75, expected one of SM80, SM86, SM89",
        ),
        (
            ["trt.targets=[SM75,SM89]"],
            "trt.targets is ['SM75', 'SM89'], expected newer ones, because TensorRT for RTX multiplies no",
        ),
    ],
)
def test_what_a_preset_cannot_do_is_refused_before_anything_starts(overrides, sentence):
    with pytest.raises(ConfigError) as error:
        read(QuantizeJob, composed("quantize", *overrides))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "overrides",
    [
        ["quantize=int8", "quantize.per_token=true"],
        ["quantize=int8", "quantize.per_token=true", "quantize.rotation=256"],
        ["quantize=fp8", "quantize.per_token=true", "quantize.rotation=4"],
        ["quantize=int4_w4a4", "quantize.rotation=16"],
        ["quantize=nvfp4", "quantize.rotation=16"],
    ],
)
def test_inputs_that_can_be_scaled_per_token_or_rotated_are(overrides):
    quantize = read(QuantizeJob, composed("quantize", *overrides)).quantize
    assert quantize.per_token == ("quantize.per_token=true" in overrides)
    assert quantize.rotation == int(dict(each.split("=") for each in overrides).get("quantize.rotation", 0))
    assert (quantize.scaled_per_token("conv"), quantize.rotation_of("conv")) == (False, 0)
    assert (quantize.scaled_per_token("ffn"), quantize.rotation_of("qkv")) == (quantize.per_token, quantize.rotation)


def test_presets_of_inputs_as_they_come():
    dynamic, rotated = (read(QuantizeJob, composed("quantize", f"quantize={name}")).quantize for name in ADAPTIVE)
    assert (dynamic.per_token, dynamic.rotation, dynamic.shift, dynamic.smoothing) == (True, 0, True, "folded")
    assert (rotated.per_token, rotated.rotation, rotated.rounding, rotated.smoothing) == (False, 64, "gptq", "none")


@pytest.mark.parametrize("observer", ["mse", "percentile"])
def test_an_observer_of_linears_alone_has_nothing_to_judge_per_token(observer):
    """The range is 1 then; the inputs of convolutions of this preset stay in fp16."""
    quantize = read(QuantizeJob, composed("quantize", "quantize=int8")).quantize
    enable = dataclasses.replace(quantize.enable, conv=Pair("int8", None))
    given = dataclasses.replace(quantize, enable=enable, observer=observer, per_channel=True)
    check_enabled(given)
    with pytest.raises(ConfigError, match=r"^quantize\.observer is \w+, expected min_max, because no input that"):
        check_enabled(dataclasses.replace(given, per_token=True))


def test_a_conv_takes_no_input_in_blocks():
    """They lie along the last axis, which is no channel there."""
    quantize = read(QuantizeJob, composed("quantize")).quantize
    enable = dataclasses.replace(quantize.enable, conv=Pair("nvfp4", "nvfp4"))
    with pytest.raises(ConfigError, match=r"^quantize\.enable\.conv\.activation is nvfp4, expected one of int8, fp8$"):
        check_enabled(dataclasses.replace(quantize, enable=enable))
