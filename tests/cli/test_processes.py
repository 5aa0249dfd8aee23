"""Calibration by two real processes, each of which imports everything and loads the model itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.calibration.store import pack
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import LoadedModel, load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl import FAMILY
from sd_quant.places import HOME
from sd_quant.quantization.statistics import Statistics

pytestmark = [pytest.mark.nightly, pytest.mark.needs(cores=2, memory_gb=6)]

PROMPTS = ["a glossy icon of a rocket", "a cat", "two flags on a pole"]
SAMPLING = Sampling(steps=2, guidance_scale=5.0, height=64, width=64, batch_size=1, seed=3)


def fresh() -> LoadedModel:
    return load_model(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"))


def collected(model: LoadedModel, prompts=PROMPTS, devices: int = 1, **options) -> Statistics:
    names = [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]
    wanted = Pass(model, names, prompts, SAMPLING)
    return calibrate(wanted, fabric_for("cpu", devices), checkpoint_sha256="", **options)


def test_two_processes_find_exactly_what_one_finds(tmp_path):
    """Final latents too, which the decoder is calibrated on."""
    model, of_two, of_one = fresh(), dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    found = pack(collected(model, devices=2, cache=tmp_path, on_latent=of_two.__setitem__))
    torch.testing.assert_close(found, pack(collected(model, on_latent=of_one.__setitem__)), rtol=0, atol=0)
    torch.testing.assert_close(dict(sorted(of_two.items())), of_one, rtol=0, atol=0)
    [entry] = tmp_path.rglob("*.safetensors")
    written = entry.stat().st_mtime_ns
    torch.testing.assert_close(found, pack(collected(model, cache=tmp_path)), rtol=0, atol=0)
    assert entry.stat().st_mtime_ns == written  # one entry serves any number of processes


def test_an_error_in_another_process_arrives_as_its_own_sentence(tmp_path):
    model, path = fresh(), tmp_path / "overflowing.nemo"
    nn.init.constant_(model.modules["unet"].get_submodule("down_blocks.0.resnets.0.norm1").weight, 3e38)
    write_nemo(path, model.checkpoint.model_config, model.modules, torch.float32)
    overflowing = replace(model, checkpoint=open_nemo(path))
    with pytest.raises(SdQuantError) as raised:
        collected(overflowing, PROMPTS[:2], devices=2)
    layer = "down_blocks.0.resnets.0.conv1"
    assert str(raised.value) == f"the input of layer {layer} is not finite at prompt 0, step 0"
