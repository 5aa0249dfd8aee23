"""What stays in high precision is smoothed where something in front of it is, and only there."""

from dataclasses import replace

import torch

from sd_quant.interchange.weights import high_precision
from sd_quant.quantization.assignment import LayerAssignment, rewritten

NAME = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def test_a_weight_is_divided_only_where_its_input_is_multiplied(tiny):
    case = tiny("sdxl")
    weight = case.checkpoint.components["unet"][f"{NAME}.weight"]
    row = LayerAssignment(NAME, "qkv", tuple(weight.shape), pre_quant_scale=torch.full((weight.shape[1],), 4.0))
    folded = replace(row, folded_into="norm")
    for layer, expected in ((row, weight), (folded, weight / 4)):
        found = high_precision(case.checkpoint, {NAME: layer})[f"{NAME}.weight"].read()
        assert found.dtype == torch.float16 and torch.equal(found, expected.half())
    assert torch.equal(rewritten(weight, folded), weight / 4)


def test_attention_has_no_weight_of_its_own(tiny):
    case = tiny("sdxl")
    attention = NAME.removesuffix(".to_q")
    rows = {attention: LayerAssignment(attention, "attention", (), activation_format="fp8")}
    plain, found = high_precision(case.checkpoint, {}), high_precision(case.checkpoint, rows)
    assert found.keys() == plain.keys() == set(case.checkpoint.components["unet"])
    assert all(torch.equal(found[name].read(), plain[name].read()) for name in plain if name.startswith(attention))
