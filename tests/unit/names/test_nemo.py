"""The key maps against sources that are not ours: keys seen in NeMo, and diffusers' own OpenCLIP converter.

The UNet, whose keys NeMo shares with nobody, and the VAE are judged as a file of SGM's by diffusers' converters in
``checkpoints/test_single_file.py``.
"""

import gzip
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils

from sd_quant.checkpoints.nemo_networks import to_nemo
from sd_quant.files.tensors import lazy
from sd_quant.names import nemo as nemo_keys
from sd_quant.names.sgm import nemo_key, sgm_key
from tests.networks import assert_same

pytestmark = pytest.mark.commit

GOLDEN = Path(__file__).with_name("nemo_sdxl_unet_keys.txt.gz")  # "key shape" lines of NeMo's full-size UNet


def stored_shapes(component: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    places = nemo_keys.locations(component, shapes)
    return {place.key: place.layout.shape(shapes[name]) for name, place in places.items()}


def without_prefix(component: str, state: dict) -> dict:
    return {key.removeprefix(nemo_keys.PREFIX[component]): value for key, value in state.items()}


def test_full_size_unet_has_the_keys_and_shapes_seen_in_nemo(full_size_shapes):
    ours = without_prefix("unet", stored_shapes("unet", full_size_shapes["unet"]))
    golden = gzip.decompress(GOLDEN.read_bytes()).decode().splitlines()
    assert len(golden) == 1680
    assert sorted(f"{key} {'x'.join(map(str, shape))}" for key, shape in ours.items()) == golden


def nemo_tensors(component: str, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = to_nemo(component, {name: lazy(tensor) for name, tensor in parameters.items()})
    tensors = {key: tensor.read() for key, tensor in state.items()}
    assert all((tuple(tensors[key].shape), tensors[key].dtype) == (state[key].shape, state[key].dtype) for key in state)
    return tensors


def test_open_clip_means_the_same_to_diffusers_converter(tiny_modules):
    module = tiny_modules["text_encoder_2"]
    expected = module.state_dict()
    open_clip = without_prefix("text_encoder_2", nemo_tensors("text_encoder_2", expected))
    prefix = "conditioner.embedders.1.model."
    converted = single_file_utils.convert_open_clip_checkpoint(
        module, {prefix + key: tensor for key, tensor in open_clip.items()}, prefix=prefix
    )
    assert_same(converted, expected)


def test_full_size_has_the_2515_keys_of_stability_ai(full_size_shapes):
    keys = {
        place.key
        for component, shapes in full_size_shapes.items()
        for place in nemo_keys.locations(component, shapes).values()
    } | {nemo_keys.LOGIT_SCALE, nemo_keys.POSITION_IDS}
    sgm_keys = {sgm_key(key) for key in keys}
    assert len(keys) == len(sgm_keys) == 1680 + 248 + 196 + 1 + 390 == 2515
    assert {nemo_key(key) for key in sgm_keys} == keys
    assert {  # some of the real file, one for each rename
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.1.norm1.weight",
        "model.diffusion_model.middle_block.1.transformer_blocks.9.norm3.bias",
        "model.diffusion_model.output_blocks.0.1.transformer_blocks.9.ff.net.0.proj.weight",
        "model.diffusion_model.output_blocks.0.1.transformer_blocks.0.ff.net.2.bias",
        "model.diffusion_model.input_blocks.1.0.in_layers.2.weight",
        "model.diffusion_model.output_blocks.8.0.out_layers.3.weight",
        "model.diffusion_model.out.2.weight",
        "first_stage_model.decoder.up.0.block.0.nin_shortcut.weight",
        "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight",
        "conditioner.embedders.1.model.transformer.resblocks.31.attn.in_proj_weight",
    } <= sgm_keys
