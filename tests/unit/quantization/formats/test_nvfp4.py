"""NVFP4 against NVIDIA's definition, written down again with ml_dtypes, and against ModelOpt's NVFP4QTensor."""

import ml_dtypes
import numpy as np
import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from sd_quant.quantization.formats.nvfp4 import BLOCK, dequantize, quantize, scales

pytestmark = pytest.mark.commit


def defined(x: np.ndarray, amax: float) -> tuple[np.ndarray, float, np.ndarray, np.ndarray]:
    """Block scales, global scale, codes and numbers, in fp64 but for what has a type of its own.

    The product of both scales is rounded to fp16, as the graph multiplies them. What a block's scale is rounded from is
    fp32 as in NVIDIA's code: of bf16 numbers the ratio to ``amax`` may be halfway between two E4M3 numbers.
    """
    whole = np.float64(np.float32(amax / (6 * 448)))
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK)
    wanted = np.abs(blocks).max(-1).astype(np.float32) / np.float32(6) / np.float32(whole)
    scale = np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    product = (scale * whole).astype(np.float16).astype(np.float64)[..., None]
    elements = (blocks / np.maximum(product, 2.0**-24)).astype(ml_dtypes.float4_e2m1fn)
    numbers = elements.astype(np.float64) * product
    return scale, whole, elements.view(np.uint8).reshape(x.shape), numbers.reshape(x.shape)


def weight(magnitude: float = 1.0) -> torch.Tensor:
    """Rows and blocks of different ranges, two blocks of zeros."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=random) * torch.logspace(-2, 0, 32)[:, None]
    weight[:, : 4 * BLOCK] *= torch.rand(32, 4, generator=random).repeat_interleave(BLOCK, 1)
    weight[7, BLOCK : 3 * BLOCK] = 0
    return magnitude * weight


@pytest.mark.parametrize(
    "dtype, magnitude, headroom",
    [
        (torch.float32, 0.02, 1.0),
        (torch.float32, 300.0, 3.0),
        (torch.float16, 1.0, 3.0),
        (torch.float16, 300.0, 0.5),
        (torch.bfloat16, 0.02, 3.0),
        (torch.bfloat16, 1.0, 1.0),
    ],
)
def test_it_is_nvidias_definition(dtype, magnitude, headroom):
    """``headroom``: calibration saw larger numbers than this tensor has, or smaller ones."""
    x = weight(magnitude).to(dtype)
    amax = headroom * x.float().abs().max()
    scale, whole = scales(x, amax)
    codes = quantize(x, scale, whole)
    expected = defined(x.float().numpy(), amax.item())
    assert np.array_equal(scale.numpy(), expected[0]) and whole.item() == expected[1]
    assert np.array_equal(codes.numpy(), expected[2])
    np.testing.assert_allclose(dequantize(codes, scale, whole).numpy(), expected[3], rtol=2.0**-23, atol=0)
    assert headroom > 1 or scale.max() == 448  # the largest that E4M3 holds
    assert scales(x, headroom * x.float().abs().amax(1, keepdim=True))[1] == whole  # that of the largest row


def test_it_is_modelopts_but_for_rounding_both_scales_product_to_fp16():
    """fp16's rounding moves each number by up to 2^-11 of it, and one code in 2000 to its neighbour; measured 5e-4."""
    x = weight()
    scale, whole = scales(x, x.abs().max())
    codes = quantize(x, scale, whole)
    ours = dequantize(codes, scale, whole)
    tensor, their_scale, their_whole = NVFP4QTensor.quantize(x.clone(), BLOCK)
    zero = x.view(32, -1, BLOCK).abs().amax(-1) == 0
    assert whole == their_whole and torch.equal(scale[~zero], their_scale.float()[~zero])
    assert zero.sum() == 2 and set(their_scale.float()[zero].tolist()) == {1.0}
    assert set(scale[zero].tolist()) == {2.0**-9}  # of nothing but zeros
    theirs = tensor.dequantize(
        dtype=torch.float32, scale=their_scale, double_scale=their_whole, block_sizes={-1: BLOCK}
    )
    their_codes = torch.stack([tensor._quantized_data & 0xF, tensor._quantized_data >> 4], -1).flatten(-2)
    same = codes & 0x7 == their_codes & 0x7  # a zero has no sign there
    assert same.float().mean() > 0.998
    torch.testing.assert_close(ours[same], theirs[same], rtol=2.0**-11, atol=2.0**-25)  # half of fp16's smallest step
    neighbours = (codes[~same] & 0x7).int() - (their_codes[~same] & 0x7).int()
    assert set(neighbours.abs().tolist()) <= {1}
