"""FP8 against ml_dtypes' E4M3; against NVIDIA ModelOpt and ONNX see test_formats.py."""

import ml_dtypes
import numpy as np
import pytest
import torch

from sd_quant.quantization.formats.fp8 import QMAX, quantize

pytestmark = pytest.mark.commit


def test_codes_are_the_bit_patterns_of_ml_dtypes():
    """Of every fp16 number: E4M3 numbers, what lies halfway between two, and signed zeros. What is too large stays 448,
    where a plain cast makes NaN."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    x = torch.cat([x[~x.isnan()], torch.tensor([464.0, 465.0, 1e30, -1e30])])
    expected = x.clamp(-QMAX, QMAX).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(quantize(x, torch.tensor(1.0)).view(torch.uint8).numpy(), expected)
    assert QMAX == ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max
    assert len(set(expected.tolist())) == 254  # all but the two NaNs
