"""Numbers of eight and four bits against ml_dtypes; their blocks against ModelOpt's tensors and OCP's specification.

``interchange.test_comfyui`` and ``test_modelopt_export`` have the decoders of comfy-kitchen and of transformers.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

from sd_quant.interchange.comfyui_marks import Mxfp8
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1
from sd_quant.quantization.formats.floats import FP8
from sd_quant.quantization.formats.nvfp4 import BLOCK, dequantize, quantize, scales
from sd_quant.quantization.row_chunks import row_chunks, rows_per_chunk
from tests.layers import drawn

pytestmark = pytest.mark.commit

ANY, ONE = torch.tensor(0.0), torch.tensor(1.0)  # an amax that is not used; a scale
WEIGHTS, INPUTS, MXFP4, MXFP8 = (FORMATS[name] for name in ("fp8_128x128", "fp8_128", "mxfp4", "mxfp8"))


def test_codes_of_eight_bits_are_the_bit_patterns_of_ml_dtypes():
    """Of every fp16 number: E4M3 numbers, what lies halfway between two, and signed zeros. What is too large stays 448,
    where a plain cast makes NaN."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    x = torch.cat([x[~x.isnan()], torch.tensor([464.0, 465.0, 1e30, -1e30])])
    expected = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(FP8.quantize(x, ONE).view(torch.uint8).numpy(), expected)
    assert len(set(expected.tolist())) == 254  # all but the two NaNs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_of_four_bits_are_the_bit_patterns_of_ml_dtypes(dtype):
    """Every 64th from -8 to 8 and the neighbours of each: the ties, what is next to them, and what is beyond 6.

    And zeros with a sign, what becomes one of them, and the largest numbers that there are.
    """
    grid = torch.arange(-512, 513) / 64
    if dtype == torch.float32:
        grid = torch.cat([grid, grid.nextafter(torch.tensor(9.0)), grid.nextafter(torch.tensor(-9.0))])
    grid = torch.cat([grid, torch.tensor([-0.0, 1e-30, -1e-30, 1e4, -1e4, 3e38, torch.inf, -torch.inf])]).to(dtype)
    expected = grid.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(e2m1.encode(grid).numpy(), expected)
    codes = torch.arange(16, dtype=torch.uint8)
    numbers = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # -0 too
    assert np.array_equal(e2m1.decode(codes).numpy().view(np.int32), numbers.view(np.int32))


# MXFP4 as the OCP Microscaling Formats specification 1.0 has it in section 6.3


def specified(block: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale and codes: the largest power of two in the block over that of E2M1; what is then too large is clamped."""
    peak = float(np.abs(block).max())
    exponent = -24 if peak == 0 else math.frexp(peak)[1] - 1 - 2
    scale = 2.0 ** min(max(exponent, -24), 15)  # the exponents that fp16 has
    elements = np.clip(block.astype(np.float64) / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return scale, elements.view(np.uint8)


def powers_and_neighbours() -> torch.Tensor:
    """A logarithm in place of frexp would be off by one for some of these; 1.99 times one is beyond 6 scales."""
    powers = 2.0 ** torch.arange(-26, 21)
    neighbours = [powers.nextafter(torch.tensor(limit)) for limit in (0.0, 1e9)]
    peaks = torch.cat([powers, *neighbours, 1.5 * powers, 1.99 * powers])
    return peaks[:, None] * torch.linspace(-1, 1, MXFP4.block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, None])
def test_mxfp4s_blocks_of_all_ranges_are_as_specified(dtype):
    x = drawn(60, 8 * MXFP4.block) * torch.logspace(-7, 4 if dtype == torch.float16 else 9, 60)[:, None]
    x[5, 16:80] = 0
    x = powers_and_neighbours() if dtype is None else x.to(dtype)
    (scale,) = MXFP4.scales(x, ANY)
    expected = [specified(block) for block in x.float().view(-1, MXFP4.block).numpy()]
    assert scale.flatten().tolist() == [each for each, _ in expected]
    codes = MXFP4.quantize(x, scale).view(-1, MXFP4.block)
    assert np.array_equal(codes.numpy(), np.stack([codes for _, codes in expected]))
    assert scale.min() == 2.0**-24 and scale.max() == 2.0 ** (12 if dtype == torch.float16 else 15)


def test_mxfp8_is_modelopts_and_what_the_reader_makes_of_inputs():
    """Blocks of all ranges that fp16's powers of two hold, never clipped, in the upper half of the codes; and zeros."""
    x = drawn(60, 8 * MXFP8.block) * torch.logspace(-3, 6, 60)[:, None]
    (scale,) = MXFP8.scales(x, ANY)
    largest = x.unflatten(1, (-1, MXFP8.block)).abs().amax(-1) / scale
    assert largest.max() <= 448 and largest.min() > 224
    theirs, exponents = MXFP8QTensor.quantize(x)
    codes = MXFP8.quantize(x, scale)
    assert torch.equal(codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
    assert torch.equal(2.0 ** (exponents.float() - 127), scale)
    assert torch.equal(MXFP8.dequantize(codes, scale), Mxfp8()(x))
    assert MXFP8.scales(torch.zeros(1, MXFP8.block), ANY)[0].item() == 2.0**-24


@pytest.mark.parametrize("fmt, square", [(WEIGHTS, {-1: 128, -2: 128}), (INPUTS, {-1: 128})], ids=["weights", "inputs"])
def test_blocks_of_eight_bits_are_modelopts_with_scales_rounded_to_fp16(fmt, square):
    """Inputs have a scale for each row; of a weight 128 rows share one, the last 44 too."""
    x, rows = drawn(300, 512) * torch.logspace(0, 3, 300)[:, None], fmt.block_rows
    (scale,) = fmt.scales(x, ANY)
    _, theirs = FP8QTensor.quantize(x, block_sizes=square)
    torch.testing.assert_close(scale[::rows], theirs, rtol=2**-11, atol=0)
    assert all(torch.equal(each, each[:1].expand_as(each)) for each in scale.split(rows))
    assert not torch.equal(scale[0], scale[128]) and not torch.equal(scale[:, 0], scale[:, 1])
    if rows > 1:
        stored, _ = FP8QTensor.quantize(x.clamp(-1e4, 1e4), scales=scale[::rows], block_sizes=square)
        assert torch.equal(fmt.quantize(x, scale).float(), stored._quantized_data.float())


def test_a_chunk_of_rows_holds_whole_blocks():
    """Or a weight would be rounded otherwise chunk by chunk, as errors are measured, than as a whole."""
    weight = drawn(300, 4096) * torch.logspace(-2, 2, 300)[:, None]
    assert rows_per_chunk(weight) == 64 and rows_per_chunk(weight, WEIGHTS.block_rows) == 128
    layer = LayerAssignment("a", "ffn", (300, 4096), WEIGHTS.name, INPUTS.name, weight_amax=weight.abs().max()[None])
    pieces = [part.rounded_weight(chunk) for chunk, part in row_chunks(weight, layer)]
    assert torch.equal(torch.cat(pieces), layer.rounded_weight(weight))


# NVFP4 as NVIDIA defines it, and its NVFP4QTensor


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
