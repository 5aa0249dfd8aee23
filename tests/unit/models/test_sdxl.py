"""Against NeMo: rules on the full-size UNet (facts seen in NeMo 2.4)."""

import re

import pytest
import torch
import yaml
from diffusers import UNet2DConditionModel
from torch.nn import Conv2d

from sd_quant.models.sdxl_nemo import unet_config
from sd_quant.models.unet import layer_roles
from sd_quant.names.nemo import PREFIX, locations
from sd_quant.quantization.recipe import reason_kept

pytestmark = pytest.mark.commit

NEMO_EXCLUDED = "emb_layers.1|time_embed|input_blocks.0.0|^out.1$|skip_connection|label_emb"
NEMO_LEVELS = {1: "$^", 2: r"ff\.net", 2.5: r"ff\.net|to_q|to_k|to_v", 3: ""}  # of linears; convolutions always


@pytest.fixture(scope="module")
def layers() -> list[tuple[str, str, bool]]:
    """Of SDXL base at full size, without its weights: NeMo's name, the role, and whether it is a convolution."""
    config = yaml.safe_load("""
    unet_config: {adm_in_channels: 2816, in_channels: 4, out_channels: 4, model_channels: 320, image_size: 64,
      attention_resolutions: [4, 2], num_res_blocks: 2, channel_mult: [1, 2, 4], num_head_channels: 64,
      use_linear_in_transformer: true, transformer_depth: [1, 2, 10], context_dim: 2048}
    conditioner_config: {emb_models: [{}, {}, {emb_model: {outdim: 256}}]}
    """)
    with torch.device("meta"):
        unet = UNet2DConditionModel(**unet_config(config))
    roles = layer_roles(unet)
    places = locations("unet", [f"{name}.weight" for name in roles])
    names = {name: places[f"{name}.weight"].key.removeprefix(PREFIX["unet"]).removesuffix(".weight") for name in roles}
    return [(names[name], role, isinstance(unet.get_submodule(name), Conv2d)) for name, role in roles.items()]


@pytest.mark.parametrize("level", [1, 2, 2.5, 3])
def test_nemos_own_patterns_choose_the_same_layers(layers, level):
    for name, role, is_conv in layers:
        chosen = is_conv or re.search(NEMO_LEVELS[level], name) is not None
        expected = chosen and re.search(NEMO_EXCLUDED, name) is None
        assert (reason_kept(role, level) is None) == expected, name
