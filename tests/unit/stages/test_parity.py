import math

import pytest
import torch

from sd_quant.errors import SdQuantError
from sd_quant.stages.parity import WatchedSide, held


class Doubling:
    name, inputs = "doubling", {"x": torch.float32}

    def __call__(self, **inputs):
        return {"out": 2 * inputs["x"]}

    def close(self):
        pass


def test_an_error_within_its_tolerance_is_recorded():
    assert held("vae", 1e-4, 1e-3) == {"relative_error": 1e-4, "tolerance": 1e-3}


@pytest.mark.parametrize("error", [2e-3, math.nan, math.inf])
def test_an_error_beyond_its_tolerance_fails_the_job(error):
    with pytest.raises(SdQuantError, match="^the engine differs from torch in vae by"):
        held("vae", error, 1e-3)


def test_the_watched_unet_keeps_the_inputs_of_the_middle_call():
    side = WatchedSide({"unet_xl": Doubling(), "vae": Doubling()}, unet_call=2)
    for value in range(4):
        x = torch.full((1,), float(value))
        assert side["unet_xl"](x=x)["out"] == 2 * value
        x += 100  # what was seen is a copy
    side["vae"](x=torch.full((1,), 7.0))
    side["vae"](x=torch.full((1,), 8.0))
    assert side.seen["unet_xl"]["x"] == 2
    assert side.seen["vae"]["x"] == 7
