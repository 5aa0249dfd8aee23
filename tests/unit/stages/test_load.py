"""What ``exclude=text`` leaves out, and what is said of sizes."""

from types import SimpleNamespace

import pytest

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.errors import ConfigError
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.places import HOME
from sd_quant.stages.load import read_the_text, warn_of_size


def test_exclude_text_leaves_out_key_and_value_of_cross_attention():
    checkpoint = open_nemo(HOME / "checkpoints/sdxl_mini.nemo")
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    expected = {name for name in roles if name.endswith(("attn2.to_k", "attn2.to_v"))}
    assert set(read_the_text(checkpoint, roles)) == expected and len(expected) == 22


@pytest.mark.parametrize(("side", "warned"), [(64, []), (128, ["model", "infer"])])
def test_images_far_from_the_checkpoints_own_size_are_warned_of(caplog, side, warned):
    images = SimpleNamespace(width=side, height=side, sizes=None, path=str(HOME / "checkpoints/sdxl_mini.nemo"))
    warn_of_size(SimpleNamespace(model=images, infer=images))
    assert [message.partition(".")[0] for message in caplog.messages] == warned
    assert all("128 x 128, and this checkpoint was made for 64 x 64" in message for message in caplog.messages)


def test_each_of_several_sizes_is_warned_of(caplog):
    path = str(HOME / "checkpoints/sdxl_mini.nemo")
    images = SimpleNamespace(width=64, height=64, sizes=["64x128", "128x192", "192x64"], path=path)
    warn_of_size(SimpleNamespace(model=images, infer=SimpleNamespace(width=64, height=64, sizes=None)))
    assert [message.partition(", and")[0] for message in caplog.messages] == [
        "model.sizes ask for 128 x 192",
        "model.sizes ask for 192 x 64",
    ]


def test_a_model_without_such_layers_refuses_it():
    checkpoint = SimpleNamespace(family=SimpleNamespace(shared_inputs=lambda linears: []))
    with pytest.raises(ConfigError, match="^quantize.exclude_text is true, expected false, because no layer"):
        read_the_text(checkpoint, {"to_q": "qkv"})
