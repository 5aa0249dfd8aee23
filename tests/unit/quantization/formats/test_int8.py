"""Scales; against NVIDIA ModelOpt and ONNX see test_formats.py."""

import pytest
import torch

from sd_quant.quantization.formats.int8 import SMALLEST_SCALE, scale_of

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
    scale = scale_of(torch.tensor(list(SCALES)))
    assert scale.dtype == torch.float32 and scale.tolist() == list(SCALES.values())


@pytest.mark.parametrize("amax", [127 * 65536.0, float("inf"), float("nan")])
def test_a_scale_that_fp16_cannot_hold_is_refused(amax):
    with pytest.raises(OverflowError, match="fp16 cannot hold"):
        scale_of(torch.tensor([1.0, amax]))
