"""Another autoencoder in place of a checkpoint's: which files are read as one, and what is refused."""

import copy
import json

import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionXLPipeline

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files.checks import check_finite
from sd_quant.names.nemo import PREFIX, locations
from tests.networks import assert_same

pytestmark = [pytest.mark.commit, pytest.mark.slow]


@pytest.fixture(scope="module")
def vae(tiny_modules):
    """Another one of the same sizes, which does not overflow in fp16."""
    other = copy.deepcopy(tiny_modules["vae"])
    other.register_to_config(force_upcast=False)
    torch.manual_seed(1)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return other


@pytest.fixture
def vae_folder(vae, tmp_path):
    vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture(scope="module")
def checkpoints(tiny_nemo, tmp_path_factory):
    place = tmp_path_factory.mktemp("kinds")
    convert(tiny_nemo, place / "folder")
    convert(tiny_nemo, place / "a.safetensors")
    return {"nemo": tiny_nemo, "folder": place / "folder", "single": place / "a.safetensors"}


def opened(path, vae):
    return open_checkpoint(path, "sdxl", vae=vae)


def authors(state):
    """The tensors by Stability AI's names."""
    places = locations("vae", state)
    return {place.key.removeprefix(PREFIX["vae"]): place.layout.tensor([state[name]]).contiguous()
            for name, place in places.items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["nemo", "folder", "single"])
def test_a_folder_takes_the_place_of_any_checkpoints_and_is_handed_on(checkpoints, kind, vae, vae_folder, tmp_path):
    checkpoint = opened(checkpoints[kind], vae_folder)
    assert_same(dict(checkpoint.components["vae"]), vae.state_dict())
    assert not checkpoint.build()["vae"].config.force_upcast
    for without in ((), ("vae",)):
        target = tmp_path / f"handed{len(without)}"
        write_pipeline_without(checkpoint, {"unet", *without}, target)
        assert json.loads((target / "vae/config.json").read_text())["force_upcast"] is False
        assert any((target / "vae").glob("*.safetensors")) != bool(without)
    write_pipeline_without(checkpoint, (), tmp_path / "whole")
    assert_same(StableDiffusionXLPipeline.from_pretrained(tmp_path / "whole").vae.state_dict(), vae.state_dict())


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_single_file_has_diffusers_names_or_the_authors(checkpoints, vae, tmp_path, prefix):
    state, path = vae.state_dict(), tmp_path / "vae.safetensors"
    for names in (state, authors(state)):
        training = [f"{prefix}loss.logvar", f"{prefix}model_ema.decay", *(["model.out.bias"] if prefix else [])]
        beside = {name: torch.zeros(1) for name in training}
        safetensors.torch.save_file({prefix + name: each for name, each in names.items()} | beside, path)
        assert_same(dict(opened(checkpoints["nemo"], path).components["vae"]), state)


def written(folder, tensors):
    safetensors.torch.save_file(tensors, folder / "a.safetensors")
    return folder / "a.safetensors"


def damaged(**tensors):
    return lambda vae, folder: written(folder, authors(vae.state_dict()) | tensors)


def entry(**entries):
    def change(vae, folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        return folder

    return change


@pytest.mark.parametrize("damage, kind, said", [
    (entry(_class_name="AutoencoderTiny"), ConfigError, "is of AutoencoderTiny, expected AutoencoderKL; give one of"),
    (entry(scaling_factor=0.5), ConfigError, "whose scaling_factor is 0.5, expected 0.13025, with which the denoiser"),
    (entry(latent_channels=8), ArtifactError, "misshapen"),
    (entry(latents_mean=[0.0] * 4), ConfigError, r"whose latents_mean is \[0.0, .*expected None"),
    (entry(of_a_newer_version=1), ArtifactError, "of_a_newer_version is 1, neither used by AutoencoderKL"),
    (damaged(**{"decoder.conv_in.weight": torch.zeros(3)}), ArtifactError, "1 misshapen: decoder.conv_in.weight"),
    (damaged(**{"decoder.mid.attn_1.q.weight": torch.zeros(3)}), ArtifactError, "attentions.0.to_q.weight"),
    (damaged(**{"decoder.up.9.x": torch.zeros(3)}), ArtifactError, "1 unknown: decoder.up.9.x"),
    (damaged(**{"decoder.conv_in.bias": torch.full((64,), torch.nan)}), ArtifactError, "'decoder.conv_in.bias' of the"),
    (lambda vae, folder: written(folder, {"lora_unet_x.lora_up.weight": torch.zeros(3)}), ConfigError,
     "a.safetensors, which holds no autoencoder; give a file or"),
])  # fmt: skip
def test_anything_else_is_refused_in_one_sentence(checkpoints, vae, vae_folder, damage, kind, said):
    path = damage(vae, vae_folder)
    with pytest.raises(SdQuantError, match=said) as refusal:
        check_finite(opened(checkpoints["nemo"], path).components["vae"])
    assert type(refusal.value) is kind and str(vae_folder.parent) in str(refusal.value)
