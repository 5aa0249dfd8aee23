"""E2M1 against ml_dtypes' float4_e2m1fn."""

import ml_dtypes
import numpy as np
import pytest
import torch

from sd_quant.quantization.formats.e2m1 import decode, encode

pytestmark = pytest.mark.commit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_the_bit_patterns_of_ml_dtypes(dtype):
    """Every 64th from -8 to 8 and the neighbours of each: the ties, what is next to them, and what is beyond 6.

    And zeros with a sign, what becomes one of them, and the largest numbers that there are.
    """
    grid = torch.arange(-512, 513) / 64
    if dtype == torch.float32:
        grid = torch.cat([grid, grid.nextafter(torch.tensor(9.0)), grid.nextafter(torch.tensor(-9.0))])
    grid = torch.cat([grid, torch.tensor([-0.0, 1e-30, -1e-30, 1e4, -1e4, 3e38, torch.inf, -torch.inf])]).to(dtype)
    expected = grid.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(encode(grid).numpy(), expected)


def test_numbers_are_those_of_ml_dtypes():
    """Of every code, and -0 too."""
    codes = torch.arange(16, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decode(codes).numpy().view(np.int32), expected.view(np.int32))
