"""What ``exclude=text`` leaves out."""

from types import SimpleNamespace

import pytest

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.errors import ConfigError
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.places import HOME
from sd_quant.stages.load import read_the_text


def test_exclude_text_leaves_out_key_and_value_of_cross_attention():
    checkpoint = open_nemo(HOME / "checkpoints/sdxl_mini.nemo")
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    expected = {name for name in roles if name.endswith(("attn2.to_k", "attn2.to_v"))}
    assert set(read_the_text(checkpoint, roles)) == expected and len(expected) == 22


def test_a_model_without_such_layers_refuses_it():
    checkpoint = SimpleNamespace(family=SimpleNamespace(shared_inputs=lambda linears: []))
    with pytest.raises(ConfigError, match="^quantize.exclude_text is true, expected false, because no layer"):
        read_the_text(checkpoint, {"to_q": "qkv"})
