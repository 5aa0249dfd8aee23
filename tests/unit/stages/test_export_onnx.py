"""Two assignments share a cached file exactly when nothing that is written in it differs."""

from dataclasses import fields, replace

import pytest
import torch

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.export_onnx import REPORTED, assignment_digest

LAYER = LayerAssignment("layer", "ffn", (2, 4), "int8", "int8")
OTHER = {
    "name": "other",
    "weight_shape": (4, 2),
    "format": "int4",
    "activation_format": None,
    "weight_axis": 0,
    "weight_amax": torch.ones(2),
    "activation_amax": 1.0,
    "pre_quant_scale": torch.ones(4),
    "folded_into": "norm",
    "output_scale": torch.ones(2),
    "low_rank": (torch.ones(2, 1).half(), torch.ones(1, 4).half()),
    "attention_amax": (1.0, 2.0, 3.0),
}


def test_every_field_is_either_written_or_reported():
    assert {field.name for field in fields(LAYER)} == OTHER.keys() | REPORTED


@pytest.mark.parametrize("name", OTHER)
def test_what_is_written_makes_another_file(name):
    changed = replace(LAYER, **{name: OTHER[name]})
    assert assignment_digest({"layer": changed}) != assignment_digest({"layer": LAYER})


def test_so_does_another_number_of_a_tensor():
    up, down = OTHER["low_rank"]
    one, other = (replace(LAYER, low_rank=(up, factor)) for factor in (down, 2 * down))
    assert assignment_digest({"layer": one}) != assignment_digest({"layer": other})


def test_what_is_only_reported_does_not():
    changed = replace(LAYER, reason="kept", alpha=0.5, output_error=0.1)
    assert assignment_digest({"layer": changed}) == assignment_digest({"layer": LAYER})
