"""What stays in high precision is smoothed where something in front of it is, and only there."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from sd_quant.files.tensors import lazy
from sd_quant.interchange import weights
from sd_quant.interchange.weights import high_precision, write_file
from sd_quant.quantization.assignment import LayerAssignment, rewritten

pytestmark = pytest.mark.commit

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


def test_every_tensor_that_is_written_is_a_step_of_the_progress(tmp_path, monkeypatch):
    steps = []

    @contextmanager
    def counting(total: int, what: str):
        steps.extend((total, what))
        yield lambda: steps.append("one")

    monkeypatch.setattr(weights, "progress", counting)
    write_file(tmp_path / "a.safetensors", {name: lazy(torch.ones(2)) for name in "ab"})
    assert steps == [2, "write a.safetensors", "one", "one"]
