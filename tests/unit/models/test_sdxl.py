"""Against NeMo: rules on the full-size UNet (facts seen in NeMo 2.4), and what shared inputs claim of a small one."""

import re

import pytest
import torch
import yaml
from diffusers import UNet2DConditionModel

from sd_quant.checkpoints.nemo_keys import PREFIX, locations
from sd_quant.models.sdxl import NemoUnetPart
from sd_quant.models.sdxl_nemo import unet_config, vae_config
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import reason_kept

NEMO_EXCLUDED = "emb_layers.1|time_embed|input_blocks.0.0|^out.1$|skip_connection|label_emb"
NEMO_LEVELS = {1: "$^", 2: r"ff\.net", 2.5: r"ff\.net|to_q|to_k|to_v", 3: ""}  # of linears; convolutions always


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    """SDXL base at full size, without its weights."""
    config = yaml.safe_load("""
    unet_config: {adm_in_channels: 2816, in_channels: 4, out_channels: 4, model_channels: 320, image_size: 64,
      attention_resolutions: [4, 2], num_res_blocks: 2, channel_mult: [1, 2, 4], num_head_channels: 64,
      use_linear_in_transformer: true, transformer_depth: [1, 2, 10], context_dim: 2048}
    conditioner_config: {emb_models: [{}, {}, {emb_model: {outdim: 256}}]}
    """)
    with torch.device("meta"):
        return UNet2DConditionModel(**unet_config(config))


@pytest.fixture(scope="module")
def layers(unet) -> dict[str, tuple[str, str]]:
    """Name to (role, Linear or Conv2d)."""
    return {name: (role, type(unet.get_submodule(name)).__name__) for name, role in layer_roles(unet).items()}


@pytest.fixture(scope="module")
def nemo_names(layers) -> dict[str, str]:
    places = locations("unet", [f"{name}.weight" for name in layers])
    return {
        name.removesuffix(".weight"): place.key.removeprefix(PREFIX["unet"]).removesuffix(".weight")
        for name, place in places.items()
    }


@pytest.mark.parametrize("level", [1, 2, 2.5, 3])
def test_nemos_own_patterns_choose_the_same_layers(layers, nemo_names, level):
    for name, (role, kind) in layers.items():
        nemo = nemo_names[name]
        chosen = kind == "Conv2d" or re.search(NEMO_LEVELS[level], nemo) is not None
        expected = chosen and re.search(NEMO_EXCLUDED, nemo) is None
        assert (reason_kept(role, level) is None) == expected, (name, nemo)


@pytest.fixture(scope="module")
def small(build_unet) -> NemoUnetPart:
    """Its norms have a bias: a factor has to go into it too."""
    return NemoUnetPart(build_unet(), pooled_width=32)


@torch.no_grad()
def test_a_factor_in_front_of_an_input_and_its_inverse_behind_it_cancel(small, unet_inputs):
    """What ``shared_inputs`` claims of the network, one input at a time: the producer's first outputs are the readers'
    channels, and nobody else reads them. Either half alone is seen in the output, so neither is idle."""
    inputs, unet = unet_inputs(1), small.unet
    expected, random = small(**inputs), torch.Generator().manual_seed(0)
    folded = [shared for shared in shared_inputs(layer_roles(unet)) if shared.producer]
    assert len(folded) == 28  # 7 in each of the 4 stacks of one block
    for shared in folded:
        readers = [unet.get_submodule(name) for name in shared.readers]
        producer, width = unet.get_submodule(shared.producer), readers[0].in_features
        kept = {parameter: parameter.clone() for module in (producer, *readers) for parameter in module.parameters()}
        factor = 2 ** torch.empty(width).uniform_(-2, 2, generator=random)
        for parameter in producer.parameters():
            parameter[:width] *= factor.view(-1, *[1] * (parameter.ndim - 1))
        assert relative_error(expected, small(**inputs)) > 1e-3, shared
        for reader in readers:
            reader.weight /= factor
        assert relative_error(expected, small(**inputs)) < 1e-4, shared  # measured 1e-6
        for parameter, value in kept.items():
            parameter.copy_(value)
    assert torch.equal(small(**inputs), expected)


@torch.no_grad()
def test_readers_of_one_input_read_one_tensor_and_those_of_another_do_not(small, unet_inputs):
    read = {}
    inputs = shared_inputs(layer_roles(small.unet))
    names = [reader for shared in inputs for reader in shared.readers]
    hooks = [
        small.unet.get_submodule(name).register_forward_pre_hook(
            lambda layer, arguments, name=name: read.__setitem__(name, arguments[0])
        )
        for name in names
    ]
    given = unet_inputs(1)
    small(**given)
    for hook in hooks:
        hook.remove()
    tensors = [{id(read[name]) for name in shared.readers} for shared in inputs]
    assert all(len(ids) == 1 for ids in tensors)
    text = {id(given["context"])}
    assert sum(ids == text for ids in tensors) == 4  # of every block's cross-attention
    others = [ids.pop() for ids in tensors if ids != text]
    assert len(set(others)) == len(others)


def test_the_vae_counts_its_levels(small_config):
    config = vae_config(small_config)
    assert config["block_out_channels"] == [32, 32, 64, 128]
    assert len(config["down_block_types"]) == len(config["up_block_types"]) == 4
    assert config["scaling_factor"] == small_config["scale_factor"]
