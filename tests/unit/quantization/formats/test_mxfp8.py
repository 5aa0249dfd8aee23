"""MXFP8 against the blocks that ModelOpt makes; ``interchange.test_comfyui`` has those of comfy-kitchen."""

import pytest
import torch
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

from sd_quant.interchange.comfyui_marks import Mxfp8
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.mxfp8 import BLOCK, dequantize, quantize, scales
from tests.layers import drawn

pytestmark = pytest.mark.commit

ANY = torch.tensor(0.0)  # an amax, which is not used


def spread() -> torch.Tensor:
    """Blocks of all ranges that fp16's powers of two hold."""
    return drawn(60, 8 * BLOCK) * torch.logspace(-3, 6, 60)[:, None]


def test_a_block_is_never_clipped_and_uses_the_upper_half():
    """The specification's own scale would clip what it maps to 448..512."""
    x = spread()
    (scale,) = scales(x, ANY)
    largest = x.unflatten(1, (-1, BLOCK)).abs().amax(-1) / scale
    assert largest.max() <= 448 and largest.min() > 224


def test_numbers_by_hand():
    x = torch.zeros(1, 2 * BLOCK)
    x[0, :2], x[0, BLOCK] = torch.tensor([448.0, -1]), 449
    (scale,) = scales(x, ANY)
    assert scale.tolist() == [[1, 2]]
    assert dequantize(quantize(x, scale), scale)[0, [0, 1, BLOCK]].tolist() == [448, -1, 448]
    assert scales(torch.zeros(1, BLOCK), ANY)[0].item() == 2.0**-24 and FORMATS["mxfp8"].bits == 8


def test_numbers_are_those_of_modelopt_and_those_that_the_reader_makes_of_inputs():
    x = spread()
    (scale,) = scales(x, ANY)
    theirs, exponents = MXFP8QTensor.quantize(x)
    codes = quantize(x, scale)
    assert torch.equal(codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
    assert torch.equal(2.0 ** (exponents.float() - 127), scale)
    assert torch.equal(dequantize(codes, scale), Mxfp8()(x))
