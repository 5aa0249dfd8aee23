"""E2M1 against ml_dtypes' float4_e2m1fn."""

import ml_dtypes
import numpy as np
import pytest
import torch

from sd_quant.quantization.formats.e2m1 import LARGEST, decode, encode

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def theirs(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def test_all_codes_are_decoded():
    codes = torch.arange(16, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert decode(codes).numpy().tobytes() == expected.tobytes()  # bytes, because 0 equals -0
    assert decode(codes).max() == LARGEST


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_the_bit_patterns_of_ml_dtypes(dtype):
    """Every 64th from -8 to 8 and the neighbours of each: the ties, what is next to them, and what is beyond 6."""
    grid = torch.arange(-512, 513) / 64
    if dtype == torch.float32:
        grid = torch.cat([grid, grid.nextafter(torch.tensor(9.0)), grid.nextafter(torch.tensor(-9.0))])
    grid = grid.to(dtype)
    assert set(TIES) <= set(grid.tolist())
    assert np.array_equal(encode(grid).numpy(), theirs(grid))


def test_a_tie_goes_to_the_even_code():
    x = torch.tensor(TIES)
    assert decode(encode(x)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert decode(encode(-x)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_what_is_beyond_6_stays_6():
    x = torch.tensor([6.001, 7.0, 8.0, 1e4, 3e38, float("inf")])
    assert encode(torch.cat([x, -x])).tolist() == [7] * 6 + [15] * 6
    assert np.array_equal(encode(torch.cat([x, -x])).numpy(), theirs(torch.cat([x, -x])))


def test_zero_keeps_its_sign():
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.25, -0.25])
    assert encode(x).tolist() == [0, 8, 0, 8, 0, 8]
    assert np.array_equal(encode(x).numpy(), theirs(x))
