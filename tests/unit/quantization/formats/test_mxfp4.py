"""MXFP4 against the OCP Microscaling Formats specification 1.0, section 6.3, written down again with ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sd_quant.quantization.formats.mxfp4 import BLOCK, quantize, scales
from tests.layers import drawn

pytestmark = pytest.mark.commit

EMAX = 2  # of E2M1


def specified(block: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale and codes: the largest power of two in the block over that of E2M1; what is then too large is clamped."""
    peak = float(np.abs(block).max())
    exponent = -24 if peak == 0 else math.frexp(peak)[1] - 1 - EMAX
    scale = 2.0 ** min(max(exponent, -24), 15)  # the exponents that fp16 has
    elements = np.clip(block.astype(np.float64) / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return scale, elements.view(np.uint8)


def agrees(x: torch.Tensor) -> torch.Tensor:
    """The scales [..., blocks] of ``x``, once they and all codes are those of the specification."""
    (scale,) = scales(x, torch.tensor(0.0))
    expected = [specified(block) for block in x.float().view(-1, BLOCK).numpy()]
    assert scale.flatten().tolist() == [each for each, _ in expected]
    assert np.array_equal(quantize(x, scale).view(-1, BLOCK).numpy(), np.stack([codes for _, codes in expected]))
    return scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_of_all_ranges_are_as_specified(dtype):
    x = drawn(60, 8 * BLOCK) * torch.logspace(-7, 4 if dtype == torch.float16 else 9, 60)[:, None]
    x[5, 16:80] = 0
    scale = agrees(x.to(dtype))
    assert scale.min() == 2.0**-24 and scale.max() == 2.0 ** (12 if dtype == torch.float16 else 15)


def test_powers_of_two_and_their_neighbours_are_as_specified():
    """A logarithm in place of frexp would be off by one for some of these; 1.99 times one is beyond 6 scales."""
    powers = 2.0 ** torch.arange(-26, 21)
    neighbours = [powers.nextafter(torch.tensor(limit)) for limit in (0.0, 1e9)]
    peaks = torch.cat([powers, *neighbours, 1.5 * powers, 1.99 * powers])
    agrees(peaks[:, None] * torch.linspace(-1, 1, BLOCK))
