"""A NeMo SDXL checkpoint small enough to be built, written and read in every test."""

from pathlib import Path

import pytest
import torch
import yaml

from sd_quant.checkpoints.nemo import write_nemo
from sd_quant.checkpoints.nemo_networks import parameter_shapes, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.models.sdxl_nemo import TextShape, build_modules

MINI_CONFIG = Path(__file__).parents[2] / "examples/sdxl_mini/model_config.yaml"


@pytest.fixture(scope="session")
def tiny_config() -> dict:
    config = yaml.safe_load(MINI_CONFIG.read_text())
    config["unet_config"] |= {
        "adm_in_channels": 32 + 6 * 8, "model_channels": 32, "channel_mult": [1, 2], "attention_resolutions": [2],
        "transformer_depth": [1, 2], "context_dim": 128,
    }  # fmt: skip
    config["first_stage_config"]["ddconfig"] |= {"ch": 32, "ch_mult": [1, 2]}
    embedders = [each["emb_model"] for each in config["conditioner_config"]["emb_models"]]
    embedders[0]["layer_idx"] = 1
    for embedder in embedders[2:]:
        embedder["outdim"] = 8
    return config


@pytest.fixture(scope="session")
def tiny_texts() -> tuple[TextShape, TextShape]:
    sizes = {"vocab_size": 600, "width": 64, "layers": 2, "context": 16, "mlp_width": 96}
    return TextShape(**sizes), TextShape(**sizes, projection=32)


@pytest.fixture(scope="session")
def tiny_modules(tiny_config, tiny_texts) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    modules = build_modules(tiny_config, *tiny_texts)
    for module in modules.values():
        module.eval()
        for parameter in module.parameters():  # no two weights alike, biases and norms included
            torch.nn.init.normal_(parameter, std=0.1)
    return modules


@pytest.fixture(scope="session")
def tiny_nemo(tmp_path_factory, tiny_config, tiny_modules) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.nemo"
    write_nemo(path, tiny_config, tiny_modules, torch.float32)
    return path


@pytest.fixture(scope="session")
def full_size_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Of SDXL base, by component and diffusers' name."""
    with torch.device("meta"):
        return parameter_shapes(build_modules(sdxl_base_config(), CLIP_L, OPEN_CLIP_BIGG))
