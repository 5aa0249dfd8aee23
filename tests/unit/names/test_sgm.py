"""SGM's single file, made from NeMo's keys by a table of its own that diffusers' converter judges."""

import pickle
import re

import pytest
import safetensors.torch
import torch
from diffusers.loaders import single_file_utils

from sd_quant.checkpoints import kinds
from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo, open_sgm
from sd_quant.checkpoints.nemo_networks import parameter_shapes, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.errors import ArtifactError
from sd_quant.models.sdxl_nemo import build_modules
from sd_quant.names import nemo as nemo_keys
from sd_quant.names.nemo import PREFIX, SAME, locations
from sd_quant.names.sgm import nemo_key, sgm_names
from tests.networks import assert_same

pytestmark = pytest.mark.commit

POSITION_IDS = "conditioner.embedders.0.transformer.text_model.embeddings.position_ids"
FROM_NEMO = {  # undoes what sets NeMo apart: fused GroupNorms, and norms inside attention and feed-forward
    r"\bin_layers\.1\.": "in_layers.2.",
    r"\bout_layers\.2\.": "out_layers.3.",
    r"^model\.diffusion_model\.out\.1\.": "model.diffusion_model.out.2.",
    r"\battn([12])\.norm\.": r"norm\1.",
    r"\bff\.net\.0\.": "norm3.",
    r"\bff\.net\.1\.proj\.": "ff.net.0.proj.",
    r"\bff\.net\.3\.": "ff.net.2.",
}


def sgm_key(nemo: str) -> str:
    key = nemo.removeprefix("model.")
    for pattern, replacement in FROM_NEMO.items():
        key, count = re.subn(pattern, replacement, key)
        if count:
            break
    return key


@pytest.fixture(scope="module")
def nemo_state(tiny_nemo) -> dict[str, torch.Tensor]:
    return {key: tensor.read() for key, tensor in open_nemo(tiny_nemo).state().items()}


@pytest.fixture
def sgm(nemo_state) -> dict[str, torch.Tensor]:
    state = {sgm_key(key): tensor.contiguous() for key, tensor in nemo_state.items() if key != nemo_keys.SIGMAS}
    return state | {POSITION_IDS: torch.arange(16)[None]}


@pytest.fixture
def written(tmp_path, sgm):
    def write(changes: dict | None = None, missing: str = "nothing"):
        path = tmp_path / "sd_xl_tiny.safetensors"
        state = {key: tensor for key, tensor in (sgm | (changes or {})).items() if missing not in key}
        safetensors.torch.save_file(state, path)
        return path

    return write


@pytest.mark.slow
def test_unet_means_the_same_to_diffusers_ldm_converter(sgm, tiny_modules):
    expected = tiny_modules["unet"].state_dict()
    converted = single_file_utils.convert_ldm_unet_checkpoint(dict(sgm), dict(tiny_modules["unet"].config))
    assert_same(converted, expected)


@pytest.mark.slow
def test_every_tensor_keeps_its_bits_and_dtype(tmp_path, written, sgm, nemo_state, tiny_config):
    half = next(key for key in sgm if "out_layers.3.weight" in key)
    brain = next(key for key in sgm if "in_proj_weight" in key)
    changes = {half: sgm[half].half(), brain: sgm[brain].bfloat16()}
    convert(written(changes), tmp_path / "a.nemo", tiny_config)
    checkpoint = open_nemo(tmp_path / "a.nemo")
    assert checkpoint.model_config == tiny_config
    expected = nemo_state | {nemo_key(key): tensor for key, tensor in changes.items()}
    expected[nemo_keys.POSITION_IDS] = torch.arange(16)[None]
    assert_same({key: tensor.read() for key, tensor in checkpoint.state().items()}, expected)


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


def refusal(path, config) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_sgm(path, config)
    return str(caught.value)


def test_another_architecture_or_a_weight_under_both_namings(written, tiny_config):
    key = "model.diffusion_model.out.1.weight"
    assert "twice" in refusal(written({key: torch.ones(4, 32, 3, 3)}), tiny_config)
    assert "misshapen" in refusal(written(), sdxl_base_config())
    assert "text encoders" in refusal(written(missing="conditioner."), tiny_config)


def test_it_is_opened_without_being_converted(written, tiny_config, tiny_modules, monkeypatch):
    monkeypatch.setattr(kinds, "sdxl_base_config", lambda: tiny_config)
    opened = kinds.open_checkpoint(written({}), "sdxl", io="diffusers", max_sequence_length=None)
    for checkpoint in (opened, pickle.loads(pickle.dumps(opened))):
        assert "sample" in checkpoint.parts()["unet_xl"].contract.inputs
        for name, tensor in tiny_modules["unet"].state_dict().items():
            assert torch.equal(checkpoint.components["unet"][name], tensor)


SGM = "model.diffusion_model."


@pytest.mark.slow
def test_full_size_keys_are_those_that_sgm_is_read_by():
    with torch.device("meta"):
        modules = build_modules(sdxl_base_config(), CLIP_L, OPEN_CLIP_BIGG)
    names = list(parameter_shapes(modules)["unet"])
    found = sgm_names(names)
    places = locations("unet", names)
    assert len(set(found.values())) == len(names) == 1680
    assert all(nemo_key(SGM + key) == places[name].key for name, key in found.items())
    assert {place.layout for place in places.values()} == {SAME} and PREFIX["unet"] == f"model.{SGM}"
    assert found["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.2.conv.weight"
    assert found["add_embedding.linear_1.weight"] == "label_emb.0.0.weight"  # both tell ComfyUI-GGUF that this is SDXL
    norm = "mid_block.attentions.0.transformer_blocks.9.norm3.bias"
    assert found[norm] == "middle_block.1.transformer_blocks.9.norm3.bias"
    assert max(map(len, found.values())) <= 127  # ggml's longest name of a tensor
