import pytest
import torch

from sd_quant.inference.watched import WatchedVariant

pytestmark = pytest.mark.commit


class Doubling:
    name, inputs, device = "doubling", {"x": torch.float32}, torch.device("cpu")

    def __call__(self, **inputs):
        return {"out": 2 * inputs["x"]}


def test_the_watched_unet_keeps_the_inputs_of_the_calls_that_are_named():
    variant = WatchedVariant({"unet_xl": Doubling(), "vae": Doubling()}, {"unet_xl": {0, 2}})
    for value in range(4):
        x = torch.full((1,), float(value))
        assert variant["unet_xl"](x=x)["out"] == 2 * value
        variant["vae"](x=x + 7)
        x += 100  # what was seen is a copy
    assert variant.seen == {"unet_xl": {0: {"x": 0}, 2: {"x": 2}}, "vae": {0: {"x": 7}}}
