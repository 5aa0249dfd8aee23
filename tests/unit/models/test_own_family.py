"""A family of a user's own is one file and its line of ``FAMILIES``: nothing else of the project knows families."""

import sys
from pathlib import Path

import pytest
import torch

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models import FAMILIES
from sd_quant.models.checkpoint import empty_denoiser, samples_per_image

from ...pipelines import sd15_of_one_level

pytestmark = pytest.mark.slow

FILE = '''
"""Stable Diffusion whose cross-attention stays as it is, with a name of its own for the UNet and for its output."""

from dataclasses import replace

from sd_quant.models import sd, unet
from sd_quant.models.roles import roles_of
from sd_quant.models.sd import FROM_IMAGES, NETWORKS, OPTIONAL, PIPELINES
from sd_quant.models.sd import attentions, encode, pack, shared_inputs, unpack

DENOISER, GUIDES, TOKENS = "my_unet", True, None
EXCLUDED = (*unet.EXCLUDED, "attn2")


def parts(configs, tokens, io):
    described = sd.parts(configs, tokens, io)
    denoiser = described.pop("unet")
    return {"my_unet": replace(denoiser, contract=replace(denoiser.contract, outputs=("my_noise",)))} | described


def layer_roles(network):
    return roles_of(network, EXCLUDED)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "pipeline"
    sd15_of_one_level(path)
    return path


@pytest.fixture(autouse=True)
def my_sd(tmp_path, monkeypatch):
    (tmp_path / "my_sd_module.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, "my_sd", "my_sd_module")
    yield
    sys.modules.pop("my_sd_module", None)


def test_a_folder_of_its_kind_is_sent_to_it_too(folder):
    with pytest.raises(ConfigError, match="use model=sd15 or model=sd21 or model=my_sd$"):
        open_pipeline(folder, "flux")


def test_its_roles_are_its_own(folder):
    checkpoint = open_pipeline(folder, "my_sd")
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    plain = open_pipeline(folder, "sd15").family.layer_roles(empty_denoiser(checkpoint))
    changed = {name for name in plain if roles[name] != plain[name]}
    assert changed == {name for name in plain if ".attn2." in name} and len(changed) > 4
    assert {roles[name] for name in changed} == {"excluded"} and samples_per_image(checkpoint, 2.0) == 2


def test_it_draws(folder):
    """Through a part and an output of its own names."""
    parts = ["my_unet", "vae", "text_encoder"]
    checkpoint = open_checkpoint(folder, "my_sd", io=None, max_sequence_length=None, parts=parts)
    assert list(checkpoint.parts()) == parts
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    generated = pipeline(["a red cat"], Sampling(2, 3.0, 64, 64, 1, 0))
    assert generated.images.shape == (1, 64, 64, 3) and torch.isfinite(generated.latents).all()
