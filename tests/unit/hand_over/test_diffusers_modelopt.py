"""Our state dict, restored by ModelOpt: the same codes, and the same output bit for bit."""

import pytest
import torch

from sd_quant.checkpoints.tensors import lazy
from sd_quant.hand_over.diffusers_modelopt import of_codes
from sd_quant.quantization.formats import FORMATS


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_a_weight_of_codes_gives_the_same_codes(assign, calibrated, fmt):
    rows, unet = assign(fmt, fmt, per_channel=fmt == "int8"), calibrated.part().unet
    layers = [layer for layer in rows.values() if layer.format is not None]
    for layer in layers:
        weight = unet.get_submodule(layer.name).weight
        from sd_quant.quantization.assignment import rewritten

        codes, scales = layer.codes_and_scales(rewritten(weight, layer))
        stored = of_codes(lazy(weight), layer).read().float()
        again = FORMATS[fmt].quantize(stored, *scales)
        assert torch.equal(again.float(), codes.float()), layer.name
