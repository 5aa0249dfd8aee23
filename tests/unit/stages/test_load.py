"""What patterns of layers make of a recipe, and what is said of sizes."""

from types import SimpleNamespace
from typing import Any

import pytest

from sd_quant.errors import ConfigError
from sd_quant.models.checkpoint import empty_part, roles_of_part
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages.assign import assign_parts
from sd_quant.stages.load import other_denoisers, presets_of_parts
from tests.layers import drawn, statistics_of

from .conftest import loaded

pytestmark = [pytest.mark.commit, pytest.mark.slow]


def test_layers_that_the_family_excludes_are_linears_when_they_are_included():
    plain, included = loaded(), loaded("quantize.include.sdxl=[time_embedding.*,conv_in]", preset="int8_per_tensor")
    changed = {name for name, role in included.roles.items() if role != plain.roles[name]}
    assert changed == {"time_embedding.linear_1", "time_embedding.linear_2", "conv_in"}
    assert included.roles["conv_in"] == "conv" and included.roles["time_embedding.linear_2"] == "linear"
    assert "excluded" not in loaded("quantize.include.sdxl=['*']", preset="int8_per_tensor").roles.values()
    readers = {name for shared in included.shared_inputs for name in shared.readers}
    assert changed - {"conv_in"} <= readers, "every linear that may be quantized reads a known input"


def test_weights_alone_leave_the_inputs_and_have_no_branch():
    made = loaded("quantize.weights_alone.sdxl=[*.ff.net.2]")
    alone = {name for name in made.roles if name.endswith(".ff.net.2")}
    assert set(made.weights_alone) == alone and alone
    for name in made.roles:
        own = made.own(name, made.recipe)
        expected = ("int4", None, 0) if name in alone else ("int4", "int4", 32)
        assert (own.enable.linear.weight, own.enable.linear.activation, own.rank) == expected
    whole = loaded("quantize.weights_alone.sdxl=[*.ff.net.2]", preset="int8_per_tensor")
    assert not whole.recipe.per_channel and not whole.own(min(alone), whole.recipe).per_channel, "a scale stays one"


def test_other_parts_are_quantized_but_for_what_their_networks_keep():
    """And for the last layer of an encoder whose last but one state is read."""
    presets = "{clip1:int8_weight_only,clip2:int8_weight_only,vae:int8_weight_only}"
    found = assign_parts(loaded(f"quantize.parts={presets}"), {})
    kept = {part: {name for name, layer in rows.items() if layer.format is None} for part, rows in found.items()}
    assert kept["vae"] == {"post_quant_conv", "decoder.conv_in", "decoder.conv_out"}
    assert kept["clip2"] == {"text_projection"} and len(kept["clip1"]) == 6
    assert all(".layers.2." in f".{name}" for name in kept["clip1"])
    assert all(layer.activation_format is None for rows in found.values() for layer in rows.values())


def test_a_calibrated_part_has_its_inputs_quantized_and_its_norms_absorb_what_smooths_them():
    """A layer that calibration never reached stays as it is."""
    held = loaded("quantize.parts={clip2:int8}")
    names = [name for name, role in roles_of_part(held.checkpoint, "clip2").items() if role != "excluded"]
    network, unread = empty_part(held.checkpoint, "clip2"), names[-1]
    inputs = {name: statistics_of(drawn(8, network.get_submodule(name).in_features)) for name in names[:-1]}
    rows = assign_parts(held, {"clip2": Statistics(inputs, {})})["clip2"]
    assert (rows[unread].format, rows[unread].reason) == (None, "never reached in calibration")
    quantized = {name for name, row in rows.items() if row.format}
    assert quantized == set(inputs) and all(rows[name].activation_format == "int8" for name in quantized)
    assert not any(rows[name].multiplies for name in quantized)
    assert {name for name in quantized if rows[name].alpha is None} == {n for n in quantized if n.endswith(".fc2")}
    norms = {name for name, row in rows.items() if row.role == "norm"}
    assert norms == {f"text_model.encoder.layers.{block}.layer_norm{norm}" for block in range(3) for norm in (1, 2)}


def test_a_second_denoiser_has_the_first_ones_recipe_a_preset_of_its_own_or_none():
    """And it is no part beside one that ``model.denoiser`` names."""
    names = ("transformer", "transformer_2", "text_encoder", "text_encoder_2", "image_encoder", "vae")
    parts = {name: SimpleNamespace(refused=None, component=name, in_steps=False) for name in names}
    checkpoint = SimpleNamespace(family=SimpleNamespace(DENOISERS=names[:2]))
    session: Any = SimpleNamespace(parts=parts, denoiser="transformer", checkpoint=checkpoint)
    of_text = {"text_encoder": "int8", "text_encoder_2": "fp8"}
    assert presets_of_parts(session, {"text_encoders": "int8", "text_encoder_2": "fp8"}) == of_text
    for denoiser, given, others in (
        (None, {}, ["transformer_2"]), (None, {"transformer_2": "fp8"}, ["transformer_2"]),
        (None, {"transformer_2": "fp16"}, []), ("transformer", {}, []),
    ):  # fmt: skip
        assert other_denoisers(session, SimpleNamespace(denoiser=denoiser), SimpleNamespace(parts=given)) == others
        assert presets_of_parts(session, given) == {}
    for part, named in ("transformer_2", "transformer"), ("transformer", None), ("transformer_3", None):
        with pytest.raises(ConfigError, match=f"^quantize.parts is {part}, expected parts .*: .*text_encoder, .*vae"):
            presets_of_parts(session, {part: "int8"}, named)


@pytest.mark.parametrize(("override", "message"), [
    ("include.sdxl=[conv_on]", "include has 'conv_on', which matches none of the "),
    ("include.sdxl=[*.to_q]", r"include has '\*.to_q', which matches none of the "),  # it is quantized
    ("parts={unet_xl:int8_weight_only}", "parts is unet_xl, expected parts .*denoiser: vae, clip1, clip2"),
    ("parts={t5:int8_weight_only}", "parts is t5, expected parts "),
    ("parts={vae:svdquant_w4a4}", "parts gives vae the preset svdquant_w4a4, which does not fit: int4 has blocks of 64,"
     " which do not divide the 288 inputs of decoder.*; choose another preset for this part$"),
    ("parts={clip1:int8}", "parts gives clip1 a preset .* there are no statistics of clip1; "),
    ("weights_alone.sdxl=[nothing]", "weights_alone has 'nothing', which matches none of the 1"),
    ("weights_alone.sdxl=[*.attn1.to_q]", "weights_alone matches .*attn1.to_q and not .*attn1.to_k"),
])  # fmt: skip
def test_patterns_and_parts_that_cannot_be_meant_are_refused(override, message):
    """A part whose inputs decide needs statistics of its own, which are of another part here."""
    with pytest.raises(ConfigError, match=rf"^quantize\.{message}"):
        assign_parts(loaded(f"quantize.{override}"), {"clip2": Statistics({}, {})})
