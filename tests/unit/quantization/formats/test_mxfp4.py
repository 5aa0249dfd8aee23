"""MXFP4 against the OCP Microscaling Formats specification 1.0, section 6.3, written down again with ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sd_quant.quantization.formats.mxfp4 import BLOCK, dequantize, pack, quantize, scales

EMAX = 2  # of E2M1
NO_AMAX = torch.tensor(0.0)


def specified(block: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale and codes: the largest power of two in the block over that of E2M1; what is then too large is clamped."""
    peak = float(np.abs(block).max())
    exponent = -24 if peak == 0 else math.frexp(peak)[1] - 1 - EMAX
    scale = 2.0 ** min(max(exponent, -24), 15)  # the exponents that fp16 has
    elements = np.clip(block.astype(np.float64) / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return scale, elements.view(np.uint8)


def agrees(x: torch.Tensor) -> torch.Tensor:
    """The scales [..., blocks] of ``x``, once they and all codes are those of the specification."""
    (scale,) = scales(x, NO_AMAX)
    expected = [specified(block) for block in x.float().view(-1, BLOCK).numpy()]
    assert scale.flatten().tolist() == [each for each, _ in expected]
    assert np.array_equal(quantize(x, scale).view(-1, BLOCK).numpy(), np.stack([codes for _, codes in expected]))
    return scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_of_all_ranges_are_as_specified(dtype):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8 * BLOCK, generator=random) * torch.logspace(-7, 4, 60)[:, None]
    x[5, 16:80] = 0
    scale = agrees(x.to(dtype))
    assert scale.min() == 2.0**-24 and scale.max() >= 2.0**12


def test_numbers_of_one_block_that_differ_a_lot_are_as_specified():
    random = torch.Generator().manual_seed(1)
    agrees(torch.randn(64, 4 * BLOCK, generator=random) * 2 ** (20 * torch.rand(64, 4 * BLOCK, generator=random) - 12))


@pytest.mark.parametrize("exponent", [-26, -24, -22, -21, -10, -1, 0, 1, 2, 10, 17, 18, 20])
def test_powers_of_two_and_their_neighbours_are_as_specified(exponent):
    """A logarithm in place of frexp would be off by one for some of these."""
    power = torch.tensor(2.0**exponent)
    for peak in (power, power.nextafter(torch.tensor(0.0)), power.nextafter(torch.tensor(1e9)), 1.5 * power):
        x = torch.linspace(-1, 1, BLOCK) * peak
        agrees(x)


def test_the_largest_of_a_block_that_is_beyond_6_is_clamped():
    """7.9 is less than 8, so the scale stays 1 (5.2: the scale is no larger than the peak's exponent asks for)."""
    x = torch.full((BLOCK,), 7.9)
    scale = agrees(x)
    assert scale.item() == 1 and dequantize(quantize(x, scale), scale)[0] == 6


def test_scales_are_powers_of_two_that_fp16_holds():
    random = torch.Generator().manual_seed(2)
    x = torch.randn(200, BLOCK, generator=random) * torch.logspace(-12, 12, 200)[:, None]
    (scale,) = scales(x, NO_AMAX)
    mantissa, exponent = torch.frexp(scale)
    assert (mantissa == 0.5).all() and torch.equal(scale, scale.half().float())
    assert ((exponent - 1).min(), (exponent - 1).max()) == (-24, 15)


def test_what_fp16_held_before_never_reaches_the_largest_scale():
    """So storing the exponent in fp16 instead of E8M0 costs no fp16 weight anything."""
    (scale,) = scales(torch.full((BLOCK,), 65504.0), NO_AMAX)
    assert scale.item() == 2.0**13


def test_two_codes_to_a_byte_the_first_in_the_low_half():
    x = torch.tensor([0.5, -6.0] * (BLOCK // 2))
    (scale,) = scales(x, NO_AMAX)
    assert set(pack(quantize(x, scale)).tolist()) == {0xF1}
