"""What stays in high precision is smoothed where something in front of it is, and only there."""

from dataclasses import replace

import pytest
import torch

from sd_quant.hand_over.weights import codes_and_scales, flat_shape, high_precision, quantized, scales_shape
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.recipe import Enable, Pair, Recipe

NAME = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.mark.parametrize("conv, linear, per_channel", [("int8", "int8", True), ("fp8", "int4", False)])
def test_shapes_are_known_without_the_weight(tiny, conv, linear, per_channel):
    case = tiny("sdxl")
    recipe = Recipe(3.0, None, enable=Enable(Pair(conv, None), Pair(linear, None), None), per_channel=per_channel)
    layers = quantized(case.assignment(recipe, "diffusers_sdnq"))
    assert {layer.format for layer in layers.values()} == {conv, linear}
    for layer in layers.values():
        codes, scales = codes_and_scales(case.checkpoint, layer)
        assert (codes.shape, scales.shape) == (flat_shape(layer), scales_shape(layer)), layer.name


def test_a_weight_is_divided_only_where_its_input_is_multiplied(tiny):
    case = tiny("sdxl")
    weight = case.checkpoint.components["unet"][f"{NAME}.weight"]
    row = LayerAssignment(NAME, "qkv", tuple(weight.shape), pre_quant_scale=torch.full((weight.shape[1],), 4.0))
    folded = replace(row, folded_into="norm")
    for layer, expected in ((row, weight), (folded, weight / 4)):
        found = high_precision(case.checkpoint, {NAME: layer})[f"{NAME}.weight"].read()
        assert found.dtype == torch.float16 and torch.equal(found, expected.half())
    assert torch.equal(rewritten(weight, folded), weight / 4)


def test_a_bias_has_what_it_has_absorbed(tiny):
    case, name = tiny("sdxl"), f"{NAME.rpartition('.attn1')[0]}.attn1.to_out.0"
    bias = case.checkpoint.components["unet"][f"{name}.bias"]
    shift, scale = torch.linspace(-1, 1, len(bias)), torch.full((len(bias),), 2.0)
    row = LayerAssignment(name, "out", (len(bias), len(bias)), output_shift=shift, output_scale=scale)
    found = high_precision(case.checkpoint, {name: row})[f"{name}.bias"].read()
    assert torch.equal(found, (2 * bias.float() + shift).half())


def test_attention_has_no_weight_of_its_own(tiny):
    case = tiny("sdxl")
    attention = NAME.removesuffix(".to_q")
    rows = {attention: LayerAssignment(attention, "attention", (), activation_format="fp8")}
    plain, found = high_precision(case.checkpoint, {}), high_precision(case.checkpoint, rows)
    assert found.keys() == plain.keys() == set(case.checkpoint.components["unet"])
    assert all(torch.equal(found[name].read(), plain[name].read()) for name in plain if name.startswith(attention))
