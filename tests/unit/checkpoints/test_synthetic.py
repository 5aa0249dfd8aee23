import pytest
import torch

from sd_quant.checkpoints.checks import check_finite
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG, write_synthetic
from sd_quant.models.sdxl_nemo import TextShape, build_modules

pytestmark = pytest.mark.slow
CLIP1 = TextShape(vocab_size=100, width=64, layers=2, context=16, mlp_width=96)
CLIP2 = TextShape(vocab_size=100, width=64, layers=2, context=16, mlp_width=96, projection=32)


@pytest.fixture
def written(tmp_path, tiny_config):
    def write(name: str, dtype: torch.dtype = torch.float16, seed: int = 0):
        write_synthetic(tmp_path / name, dtype, seed, tiny_config, CLIP1, CLIP2)
        return tmp_path / name

    return write


def test_full_size_is_that_of_sdxl_base():
    with torch.device("meta"):
        modules = build_modules(sdxl_base_config(), CLIP_L, OPEN_CLIP_BIGG)
    counts = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in modules.items()}
    assert counts == {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_is_a_whole_checkpoint_of_finite_weights(written, dtype):
    checkpoint = open_nemo(written("a.nemo", dtype))
    for source in checkpoint.components.values():
        check_finite(source)
        assert {parameter.dtype for parameter in source.parameters.values()} == {dtype}


def test_the_seed_decides_every_byte(written):
    assert written("a.nemo").read_bytes() == written("b.nemo").read_bytes()
    unets = [open_nemo(written(f"{seed}.nemo", seed=seed)).components["unet"] for seed in (0, 1)]
    assert not any(torch.equal(unets[0][name], unets[1][name]) for name in unets[0])


def test_ranges_of_channels_differ_as_those_of_trained_weights_do(written):
    unet = open_nemo(written("a.nemo")).components["unet"]
    weight = unet["mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj.weight"].float()
    for axis in (0, 1):
        spread = weight.std(dim=1 - axis)
        assert spread.max() / spread.min() > 2
    assert unet["mid_block.attentions.0.norm.weight"].float().mean() == pytest.approx(1, abs=0.1)
