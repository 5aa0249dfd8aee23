"""A NeMo SDXL checkpoint small enough to be built, written and read in every test."""

from pathlib import Path

import pytest
import torch

from sd_quant.checkpoints.nemo import write_nemo
from sd_quant.checkpoints.nemo_networks import parameter_shapes, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.models.sdxl_nemo import TextShape, build_modules
from tests import small_nemo


@pytest.fixture(scope="session")
def tiny_config() -> dict:
    config = small_nemo.config(transformer_depth=[1, 2])
    config["first_stage_config"]["ddconfig"] |= {"ch": 32, "ch_mult": [1, 2]}
    config["conditioner_config"]["emb_models"][0]["emb_model"]["layer_idx"] = 1
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
