"""The key map against sources that are not ours: keys seen in NeMo, and diffusers' own OpenCLIP converter.

The UNet, whose keys NeMo shares with nobody, and the VAE are judged as a file of SGM's by diffusers' converters in
``checkpoints/test_single_file.py``.
"""

import gzip
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils

from sd_quant.checkpoints.nemo_state import to_nemo
from sd_quant.files.tensors import lazy
from sd_quant.names import nemo as nemo_keys
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
