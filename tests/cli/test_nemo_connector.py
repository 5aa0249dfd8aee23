"""Our archives in NeMo's own hands and the other way round."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.nemo_and_diffusers import PIPELINE
from sd_quant.models.sdxl_nemo import TextShape, build_modules, scheduler, unet_config
from sd_quant.places import HOME
from tests.networks import assert_same, built_networks

pytestmark = [pytest.mark.commit, pytest.mark.nemo]


@pytest.fixture(scope="module")
def connector():
    pytest.importorskip("nemo.core", reason="needs nemo_toolkit[core]")
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("needs Python 3.11.4 or later: NeMo extracts archives with the filter that came with it")
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    return SaveRestoreConnector


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A random SDXL of few channels, and the archive that we write of it."""
    config = yaml.safe_load((HOME / "examples/sdxl_mini/model_config.yaml").read_text())
    config["unet_config"] |= {"model_channels": 32, "context_dim": 128, "adm_in_channels": 32 + 6 * 64}
    clip = TextShape(vocab_size=100, width=64, layers=3, context=16, mlp_width=96)
    modules = build_modules(config, clip, replace(clip, projection=32))
    path = tmp_path_factory.mktemp("written") / "ours.nemo"
    write_nemo(path, config, modules, torch.float32)
    return path, config, modules


def unpack_with_nemo(connector, path: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    connector._unpack_nemo_file(str(path), str(folder))
    assert sorted(file.name for file in folder.iterdir()) == ["model_config.yaml", "model_weights.ckpt"]
    return connector._load_state_dict_from_disk(str(folder / "model_weights.ckpt"))


def test_nemo_loads_our_archive(tmp_path, connector, written):
    path, config, modules = written
    state = unpack_with_nemo(connector, path, tmp_path / "unpacked")
    assert yaml.safe_load((tmp_path / "unpacked/model_config.yaml").read_text()) == config
    prefix = "model.model.diffusion_model."
    assert torch.equal(state[prefix + "input_blocks.0.0.weight"], modules["unet"].conv_in.weight)
    assert torch.equal(state[prefix + "out.1.weight"], modules["unet"].conv_out.weight)
    attention = modules["text_encoder_2"].text_model.encoder.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(state["model.conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"], joined)
    expected = sum(parameter.numel() for module in modules.values() for parameter in module.parameters())
    assert sum(tensor.numel() for tensor in state.values()) == expected + 1000 + 1  # sigmas and logit_scale


def test_we_load_an_archive_that_nemo_packed(tmp_path, connector, written):
    path, _, modules = written
    unpack_with_nemo(connector, path, tmp_path / "unpacked")
    connector._make_nemo_file_from_folder(str(tmp_path / "theirs.nemo"), str(tmp_path / "unpacked"))
    built = built_networks(open_nemo(tmp_path / "theirs.nemo"))
    for component, module in modules.items():
        assert_same(built[component].state_dict(), module.state_dict())


class Restored(torch.nn.Module):
    """What the connector restores into: keeps what it is given."""

    _set_model_restore_state = staticmethod(lambda is_being_restored, folder=None: None)

    @classmethod
    def from_config_dict(cls, config, trainer):
        restored = cls()
        restored.config = config
        return restored

    def load_state_dict(self, state, strict):
        self.state, self.strict = state, strict


def test_nemo_restores_an_archive_converted_from_a_diffusers_folder(tmp_path, connector, written):
    path, config, modules = written
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(PIPELINE))
    scheduler().save_pretrained(folder / "scheduler")
    for name, module in modules.items():
        module.save_pretrained(folder / name)
    convert(folder, tmp_path / "converted.nemo")

    restored = connector().restore_from(Restored, str(tmp_path / "converted.nemo"), map_location="cpu")
    assert unet_config(restored.config) == unet_config(config)
    expected = unpack_with_nemo(connector, path, tmp_path / "expected")
    assert restored.strict
    assert_same(restored.state, expected)
