"""Against NeMo: layer counts and rules on the full-size UNet, and the sampler's timesteps (facts seen in NeMo 2.4)."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
import yaml
from diffusers import UNet2DConditionModel
from torch import nn

from sd_quant.checkpoints.nemo_keys import PREFIX, locations
from sd_quant.models.sdxl import NemoUnetPart
from sd_quant.models.sdxl_nemo import scheduler, unet_config, vae_config
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


def test_the_size_of_sdxl(unet):
    assert sum(parameter.numel() for parameter in unet.parameters()) == 2_567_463_684


def test_every_linear_and_convolution_has_a_role(unet, layers):
    assert Counter(kind for _, kind in layers.values()) == {"Linear": 743, "Conv2d": 51}
    weighted = {
        name for name, module in unet.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    norms = {name for name in weighted if "norm" in name.split(".")[-1]}
    assert weighted - norms == layers.keys()


@pytest.mark.parametrize("level, linears", [(1, 0), (2, 140), (2.5, 560), (3, 722)])
def test_golden_counts(layers, level, linears):
    quantized = Counter(kind for role, kind in layers.values() if reason_kept(role, level) is None)
    assert quantized == {"Linear": linears, "Conv2d": 38} if linears else quantized == {"Conv2d": 38}


@pytest.mark.parametrize("level", [1, 2, 2.5, 3])
def test_nemos_own_patterns_choose_the_same_layers(layers, nemo_names, level):
    for name, (role, kind) in layers.items():
        nemo = nemo_names[name]
        chosen = kind == "Conv2d" or re.search(NEMO_LEVELS[level], nemo) is not None
        expected = chosen and re.search(NEMO_EXCLUDED, nemo) is None
        assert (reason_kept(role, level) is None) == expected, (name, nemo)


def test_the_excluded_layers_by_rule(layers):
    excluded = [(name, kind) for name, (role, kind) in layers.items() if role == "excluded"]
    words = Counter((next(filter(RULES.__contains__, name.split("."))), kind) for name, kind in excluded)
    assert words == {
        ("time_emb_proj", "Linear"): 17,  # one in each ResBlock
        ("time_embedding", "Linear"): 2,
        ("add_embedding", "Linear"): 2,
        ("conv_in", "Conv2d"): 1,
        ("conv_out", "Conv2d"): 1,
        ("conv_shortcut", "Conv2d"): 11,  # where a ResBlock changes its width
    }
    named = {name for name, _ in excluded if not name.startswith(("down", "mid", "up"))}
    assert named == {
        "conv_in",
        "time_embedding.linear_1",
        "time_embedding.linear_2",
        "add_embedding.linear_1",
        "add_embedding.linear_2",
        "conv_out",
    }


RULES = {"time_emb_proj", "time_embedding", "add_embedding", "conv_in", "conv_out", "conv_shortcut"}


@pytest.mark.parametrize(
    "name, role",
    [
        ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "qkv"),
        ("down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v", "qkv"),
        ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0", "linear"),
        ("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj", "ffn"),
        ("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2", "ffn"),
        ("down_blocks.1.attentions.0.proj_in", "linear"),
        ("mid_block.attentions.0.proj_out", "linear"),
        ("mid_block.resnets.0.conv1", "conv"),
        ("down_blocks.0.downsamplers.0.conv", "conv"),
        ("up_blocks.0.upsamplers.0.conv", "conv"),
        ("up_blocks.0.resnets.0.conv_shortcut", "excluded"),
    ],
)
def test_roles_by_example(layers, name, role):
    assert layers[name][0] == role


def test_every_linear_that_may_be_quantized_reads_exactly_one_input(layers):
    readers = Counter(reader for shared in shared_inputs(layers) for reader in shared.readers)
    expected = [name for name, (role, kind) in layers.items() if kind == "Linear" and role != "excluded"]
    assert readers == dict.fromkeys(expected, 1)


def test_producers_are_norms_or_linears_with_enough_outputs(unet, layers):
    for shared in shared_inputs(layers):
        widths = {unet.get_submodule(reader).in_features for reader in shared.readers}
        assert len(widths) == 1
        if shared.producer is not None:
            producer = unet.get_submodule(shared.producer)
            assert isinstance(producer, nn.LayerNorm | nn.GroupNorm | nn.Linear)
            outputs = len(producer.weight)
            assert outputs == 2 * widths.pop() if shared.producer.endswith(".proj") else outputs in widths


@pytest.mark.parametrize("level, multiplications", [(1, 0), (2, 0), (2.5, 70), (3, 81)])
def test_multiplications_that_folding_leaves(layers, level, multiplications):
    """There are 2 * 2 + 2 * 10 + 10 + 3 * 10 + 3 * 2 = 70 transformer blocks in 2 + 2 + 1 + 3 + 3 = 11 stacks.

    Feed-forward folds entirely. Of query, key and value, those that read the text do not: one input in each block. Of
    the other linears only the proj_out of each stack is left.
    """
    quantized = {name for name, (role, _) in layers.items() if reason_kept(role, level) is None}
    left = [shared for shared in shared_inputs(layers) if not shared.producer and quantized & set(shared.readers)]
    assert len(left) == multiplications


@pytest.fixture(scope="module")
def small(build_unet) -> NemoUnetPart:
    """Norms have a bias: a factor has to go into it too."""
    unet = build_unet()
    for module in unet.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.bias.uniform_(-1, 1)
    return NemoUnetPart(unet, pooled_width=32)


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


@pytest.mark.parametrize("steps", [20, 40, 50])
def test_the_samplers_timesteps_are_nemos(steps):
    sampler = scheduler()
    sampler.set_timesteps(steps)
    expected = np.linspace(999, 0, steps, endpoint=False).astype(int)
    assert sampler.timesteps.tolist() == expected.tolist()
    assert (expected[0], expected[1]) == (999, {20: 949, 40: 974, 50: 979}[steps])


def test_the_samplers_noise_levels_are_nemos():
    """LegacyDDPMDiscretization: sigma = sqrt((1 - a) / a), a the product of 1 - beta, beta linear in its root."""
    sampler = scheduler()
    sampler.set_timesteps(20)
    kept = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    sigmas = ((1 - kept) / kept) ** 0.5
    expected = [*sigmas[np.linspace(999, 0, 20, endpoint=False).astype(int)], 0.0]
    np.testing.assert_allclose(sampler.sigmas.numpy(), expected, rtol=1e-5)


def test_the_vae_counts_its_levels(small_config):
    config = vae_config(small_config)
    assert config["block_out_channels"] == [32, 32, 64, 128]
    assert len(config["down_block_types"]) == len(config["up_block_types"]) == 4
    assert config["scaling_factor"] == small_config["scale_factor"]
