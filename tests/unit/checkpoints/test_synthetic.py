import math

import pytest
import torch

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.synthetic import write_synthetic
from sd_quant.files.checks import check_finite

pytestmark = [pytest.mark.commit, pytest.mark.slow]


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_config, tiny_texts):
    folder = tmp_path_factory.mktemp("synthetic")

    def write(name: str, dtype: torch.dtype, seed: int = 0):
        write_synthetic(folder / name, dtype, seed, tiny_config, *tiny_texts)
        return folder / name

    return write


@pytest.fixture(scope="module")
def half(written):
    return written("half.nemo", torch.float16)


def test_full_size_is_that_of_sdxl_base(full_size_shapes):
    assert {name: sum(map(math.prod, shapes.values())) for name, shapes in full_size_shapes.items()} == {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    }


def test_the_seed_decides_every_byte_of_a_whole_checkpoint(written, half):
    assert written("again.nemo", torch.float16).read_bytes() == half.read_bytes()
    checkpoint, other = open_nemo(half), open_nemo(written("other.nemo", torch.float32, seed=1))
    for opened, dtype in ((checkpoint, torch.float16), (other, torch.float32)):
        for source in opened.components.values():
            check_finite(source)
            assert {parameter.dtype for parameter in source.parameters.values()} == {dtype}
    unet, another = checkpoint.components["unet"], other.components["unet"]
    assert not any(torch.equal(unet[name], another[name].half()) for name in unet)
