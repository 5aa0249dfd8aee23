from dataclasses import replace

import pytest
import torch

from sd_quant.errors import ConfigError
from sd_quant.hand_over import STATIC, TARGETS
from sd_quant.hand_over.adapt import adapted, per_row

COMFYUI, MODELOPT = TARGETS["comfyui"], TARGETS["diffusers_modelopt"]


def test_layers_whose_input_would_have_to_be_multiplied_stay_in_high_precision(assign):
    rows = assign("int8", "int8", per_channel=True)
    found = adapted(rows, COMFYUI)
    multiplied = {name for name, row in rows.items() if row.multiplies}
    assert multiplied and all("smoothing=none" in found[name].reason for name in multiplied)
    assert all(found[name].pre_quant_scale is None for name in multiplied)
    assert adapted(rows, MODELOPT) == rows


def test_what_no_layer_has_is_refused(assign):
    with pytest.raises(ConfigError, match="comfyui holds fp8 and none of the layers in int8"):
        adapted(assign("int8", "int8"), replace(COMFYUI, formats={"fp8": STATIC}))


def test_a_branch_is_refused(assign):
    rows = assign("nvfp4", "nvfp4", smoothing="none", alpha=None, rank=4)
    with pytest.raises(ConfigError, match=r"layers have a low-rank branch, which comfyui cannot hold"):
        adapted(rows, COMFYUI)


def test_inputs_that_come_row_by_row_have_no_static_scale(assign):
    rows = adapted(assign("int8", "int8", per_channel=True), COMFYUI)
    held = [row for row in rows.values() if row.format is not None]
    assert held and all(row.activation_format is None and row.activation_amax is None for row in held)


def test_a_scale_per_channel_is_refused_where_one_is_wanted(assign):
    with pytest.raises(ConfigError, match="none of the layers in fp8"):
        adapted(assign("fp8", "fp8", per_channel=True), COMFYUI)


def test_each_row_has_its_own_scale():
    x = torch.tensor([[127.0, 3.4, -1.0], [0.127, 0.0014, 0.0]])
    (found,) = per_row(torch.nn.Identity(), (x,))
    torch.testing.assert_close(found, torch.tensor([[127.0, 3.0, -1.0], [0.127, 0.001, 0.0]]))
