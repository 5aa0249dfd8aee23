"""Integers by hand and against ml_dtypes' packing; against NVIDIA ModelOpt and ONNX see test_formats.py."""

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import numpy_helper

from sd_quant.quantization.formats.blocks import pack_nibbles
from sd_quant.quantization.formats.integers import INT4, SMALLEST_SCALE, scale_of

pytestmark = pytest.mark.commit

SCALES = {  # by range
    127.0: 1.0,
    0.0: 1.0,
    127 * 2.0**-14: 2.0**-14,
    1e-30: SMALLEST_SCALE,
    127 * 65504.0: 65504.0,
    127 * (1 + 2.0**-12): 1.0,  # rounded to fp16
}


def test_scales_are_fp16_numbers_in_fp32():
    scale = scale_of(torch.tensor(list(SCALES)), 127)
    assert scale.dtype == torch.float32 and scale.tolist() == list(SCALES.values())


@pytest.mark.parametrize("amax", [127 * 65536.0, float("inf"), float("nan")])
def test_a_scale_that_fp16_cannot_hold_is_refused(amax):
    with pytest.raises(OverflowError, match="fp16 cannot hold"):
        scale_of(torch.tensor([1.0, amax]), 127)


def test_a_block_worked_by_hand():
    block = torch.tensor([14.0, -14.0, 1.0, 3.0, 0.9, 5.0] + [0.0] * 58)
    (scale,) = INT4.scales(block, torch.tensor(0.0))
    assert scale.tolist() == [2.0]
    assert INT4.quantize(block, scale).tolist()[:6] == [7, -7, 0, 2, 0, 2]  # 0.5 and 2.5 go to the even neighbour
    assert INT4.dequantize(INT4.quantize(block, scale), scale).tolist()[:6] == [14, -14, 0, 4, 0, 4]


@pytest.mark.parametrize("shape", [(16,), (3, 5), (2, 3, 5)])  # the last two of an odd number
def test_codes_are_packed_as_onnx_packs_them(shape):
    """Those of a transposed weight in its own order."""
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    for given in (codes, codes.movedim(0, -1)):
        stored = numpy_helper.from_array(np.ascontiguousarray(given.numpy()).astype(ml_dtypes.int4))
        assert pack_nibbles(given).numpy().tobytes() == stored.raw_data
