"""What all formats have in common, those of NVIDIA ModelOpt and of ONNX; integers by hand and by ml_dtypes' packing."""

import math
import subprocess
import sys
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.interchange.comfyui_marks import Mxfp8
from sd_quant.interchange.gguf import FILE_TYPES, WRITTEN, blocks_of
from sd_quant.places import HOME
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import weight_bytes
from sd_quant.quantization.formats import FORMATS, Format, dividing, e2m1, fake_quantize
from sd_quant.quantization.formats.blocks import pack_nibbles, per_channel
from sd_quant.quantization.formats.floats import FP8
from sd_quant.quantization.formats.integers import INT4, SMALLEST_SCALE, scale_of
from sd_quant.quantization.formats.nvfp4 import BLOCK, dequantize, quantize, scales
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rounding import with_rounded_weight
from sd_quant.quantization.row_chunks import row_chunks, rows_per_chunk
from tests.layers import drawn, statistics_of

pytestmark = pytest.mark.commit

# Of Gaussian numbers with one range for all, relative to their norm. Theory has for int8 amax / 127 / sqrt(12), with an
# amax of 4.6 here, and for fp8 about 2^-4 / sqrt(6).
ERRORS = {"int8": (0.009, 0.012), "fp8": (0.025, 0.028), "int4": (0.10, 0.115), "mxfp4": (0.11, 0.12)}
ERRORS |= {"nvfp4": (0.09, 0.10), "mxfp8": (0.025, 0.028), "int4_per_row": (0.18, 0.20), "int4_in_int8": (0.08, 0.09)}
ERRORS |= dict.fromkeys(("fp8_128", "fp8_128x128"), (0.025, 0.028))
ERRORS |= {"q4_1": (0.07, 0.08), "q5_0": (0.04, 0.045), "q5_1": (0.035, 0.04)}
ERRORS |= {"q8_0": (0.005, 0.006), "q4_k": (0.07, 0.08), "q5_k": (0.035, 0.04), "q6_k": (0.018, 0.02)}
STORED = [name for name, fmt in FORMATS.items() if fmt.onnx_type]  # in graphs


@pytest.fixture(params=FORMATS)
def name(request) -> str:
    return request.param


@pytest.fixture
def fmt(name) -> Format:
    return FORMATS[name]


def gaussian() -> Tensor:
    return drawn(64, 1024)


def largest(x: Tensor) -> Tensor:
    return x.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_loses_what_its_bits_cost_and_no_more(name, fmt, dtype):
    x = gaussian().to(dtype)
    before, found = x.clone(), fake_quantize(fmt, x, largest(x))
    assert found.dtype == torch.float32 and found.shape == x.shape and torch.equal(x, before)
    low, high = ERRORS[name]
    assert low < ((found - x.float()).norm() / x.float().norm()).item() < high


def test_zeros_stay_zeros_and_a_block_of_them_does_not_touch_the_others(fmt):
    x = gaussian()
    amax, expected = largest(x), fake_quantize(fmt, x, largest(x))
    x[5, 256:512] = expected[5, 256:512] = 0
    assert torch.equal(fake_quantize(fmt, x, amax), expected)
    for amax in (0.0, 3.0):
        assert not fake_quantize(fmt, torch.zeros(2, 256), torch.tensor(amax)).any()


def test_numbers_that_blocks_do_not_divide_and_a_range_without_end_are_refused(fmt):
    if fmt.block is None:
        assert fake_quantize(fmt, torch.ones(2, 100), torch.tensor(1.0)).shape == (2, 100)
    else:
        with pytest.raises(SdQuantError, match=f"100 numbers do not divide into blocks of {fmt.block}"):
            fmt.scales(torch.ones(2, 100), torch.tensor(1.0))
    for value in (math.inf, -math.inf, math.nan):
        x = gaussian()
        x[3, 77] = value
        with pytest.raises(OverflowError, match="inf|nan|NaN"):
            fmt.scales(x, x.abs().max())


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.numpy().tobytes()


def dequantizing(fmt: Format, x: Tensor, opset: int) -> onnx.ModelProto:
    scales = fmt.scales(x, largest(x))
    stored = [("codes", fmt.onnx_type, x.shape, fmt.pack(fmt.quantize(x, *scales)))]
    for index, (kind, dtype, scale) in enumerate(zip(fmt.onnx_scale_types, fmt.scale_dtypes, scales, strict=True)):
        stored.append((f"scale{index}", kind, scale.shape, scale.to(dtype)))
    nodes, scale = [], "scale0"
    if len(scales) > 1:
        node = helper.make_node("DequantizeLinear", ["scale0", "scale1"], ["scale"], output_dtype=TensorProto.FLOAT16)
        nodes, scale = [node], "scale"
    blocked = {} if fmt.block is None else {"axis": -1, "block_size": fmt.block}
    nodes.append(helper.make_node("DequantizeLinear", ["codes", scale], ["y"], **blocked))
    tensors = [
        helper.make_tensor(name, TensorProto.DataType.Value(kind), shape, bytes_of(tensor), raw=True)
        for name, kind, shape, tensor in stored
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, x.shape)
    graph = helper.make_graph(nodes, "dequantize", [], [output], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


@pytest.mark.parametrize("name", STORED)
def test_onnx_computes_the_same_numbers_from_what_is_stored_and_its_opset_is_the_first_with_these_types(name):
    """Exactly: its fp16 products are ours rounded to fp16."""
    fmt, x = FORMATS[name], gaussian()[:8]
    model = dequantizing(fmt, x, fmt.opset)
    onnx.checker.check_model(model, full_check=True)
    found = ReferenceEvaluator(model).run(None, {})[0]
    assert found.dtype == np.float16
    assert np.array_equal(found, fake_quantize(fmt, x, largest(x)).half().numpy())
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(dequantizing(fmt, x, fmt.opset - 1), full_check=True)


def test_the_facts_of_formats_need_no_torch():
    code = "import sys, sd_quant.quantization.formats as f; sys.exit('torch' in sys.modules or len(f.FORMATS) < 5)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME).returncode == 0


def uneven(axis: int | None) -> tuple[Tensor, Tensor]:
    """A weight with channels of very different ranges and the ranges along ``axis``, twice as much as which it has.

    Its first channel has halves for INT8, which round to the even neighbour.
    """
    weight = drawn(32, 8, 4, 8) * torch.logspace(-4, 1, 32).view(32, 1, 1, 1)
    amax = weight.abs().amax() if axis is None else weight.abs().amax((1, 2, 3))
    weight.flatten(1)[:, ::50] *= 2
    if axis == 0:
        weight[0], amax[0] = 4.5 * torch.arange(-128, 128).view(8, 4, 8), 127.0
    return weight, amax


@pytest.mark.parametrize("name, axis", [("int8", None), ("int8", 0), ("fp8", None), ("fp8", 0), ("int4", -1)])
def test_it_is_modelopts_fake_quantization(name, axis):
    """ModelOpt multiplies with a reciprocal where we divide: fp32's last bits differ, no number takes another code."""
    fmt, (weight, amax) = FORMATS[name], uneven(axis)
    weight = weight.flatten(1) if fmt.block else weight
    (scale,) = fmt.scales(weight, amax)
    scale = per_channel(scale, weight) if axis == 0 else scale
    config = {"block_sizes": {-1: fmt.block}} if fmt.block else {"axis": axis}
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=fmt.modelopt_num_bits or fmt.bits, **config))
    quantizer.amax = (scale.view(-1, 1) if fmt.block else scale) * fmt.largest_code
    ours = fmt.dequantize(fmt.quantize(weight, scale), scale)
    torch.testing.assert_close(ours, quantizer(weight), rtol=2.0**-21, atol=0)
    assert not torch.equal(ours, weight)


# Integers

SCALES = {  # by range
    127.0: 1.0, 0.0: 1.0, 127 * 2.0**-14: 2.0**-14, 1e-30: SMALLEST_SCALE, 127 * 65504.0: 65504.0,
    127 * (1 + 2.0**-12): 1.0,  # rounded to fp16
}  # fmt: skip


def test_scales_are_fp16_numbers_in_fp32():
    scale = scale_of(torch.tensor(list(SCALES)), 127)
    assert scale.dtype == torch.float32 and scale.tolist() == list(SCALES.values())
    for amax in (127 * 65536.0, math.inf, math.nan):
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
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    for given in (codes, codes.movedim(0, -1)):
        stored = numpy_helper.from_array(np.ascontiguousarray(given.numpy()).astype(ml_dtypes.int4))
        assert pack_nibbles(given).numpy().tobytes() == stored.raw_data


# Numbers of eight and four bits against ml_dtypes; their blocks against ModelOpt's tensors and OCP's specification


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
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=random) * torch.logspace(-2, 0, 32)[:, None]
    weight[:, : 4 * BLOCK] *= torch.rand(32, 4, generator=random).repeat_interleave(BLOCK, 1)
    weight[7, BLOCK : 3 * BLOCK] = 0
    return magnitude * weight


@pytest.mark.parametrize("dtype, magnitude, headroom", [
    (torch.float32, 0.02, 1.0),
    (torch.float32, 300.0, 3.0),
    (torch.float16, 1.0, 3.0),
    (torch.float16, 300.0, 0.5),
    (torch.bfloat16, 0.02, 3.0),
    (torch.bfloat16, 1.0, 1.0),
])  # fmt: skip
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


# ggml's blocks against its package's decoder, bit for bit, and against other tools' encoders


NAMES = [name for name, fmt in FORMATS.items() if ".ggml:" in fmt.module]
K_QUANTS = [name for name in NAMES if FORMATS[name].block == 256]
IN_GGUF = [name for name in NAMES if name in WRITTEN]


def uneven_rows() -> Tensor:
    x = drawn(24, 1024) * torch.logspace(-6, 1, 24)[:, None]
    x[3, 256:512] = x[4, 300:340] = x[20, 512:544] = 0
    x[5], x[6] = x[5].abs(), -x[6].abs() - 1
    return x


def searched(weight: Tensor, name: str) -> tuple[Tensor, ...]:
    pair = Pair(name, None)
    recipe = Recipe(3.0, None, enable=Enable(pair, pair, None), scale_search=True)
    layer = LayerAssignment("layer", "ffn", tuple(weight.shape), name, weight_amax=weight.abs().amax().view(1))
    return with_rounded_weight(layer, weight, statistics_of(drawn(16, weight.shape[1])), recipe).rounded


def test_a_line_worked_by_hand():
    """Of -1, 0, 1 and 2 in Q4_1: scale 3 / 15. All above zero in Q4_K: the minimum is zero, and 2 is code 15."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    scale, least = FORMATS["q4_1"].scales(x, x)
    assert least.item() == -1 and scale.item() == pytest.approx(0.2, rel=1e-3)
    assert FORMATS["q4_1"].quantize(x, scale, least)[0, :4].tolist() == [0, 5, 10, 15]
    d, dmin, s, m = FORMATS["q4_k"].scales(x.abs().repeat(1, 8) + 0.5, x)
    assert dmin.item() == 0 and not m.any() and s.tolist() == [8 * [63]]
    assert (d * 63).item() == pytest.approx(2.5 / 15, rel=1e-2)


@pytest.mark.parametrize("name, code", [("q5_0", -16), ("q6_k", -32)])
def test_the_number_of_largest_magnitude_has_the_code_farthest_from_zero(name, code):
    fmt = FORMATS[name]
    for sign in (1, -1):
        x = sign * torch.linspace(-1, 2, 256).view(1, -1)
        codes = fmt.quantize(x, *fmt.scales(x, x))
        assert codes[0, -1] == code and codes.dtype == torch.int8


def test_a_weight_that_blocks_of_256_do_not_divide_has_llama_cpps_other_format():
    assert [dividing(name, 512) for name in K_QUANTS] == K_QUANTS
    assert [dividing(name, 640) for name in K_QUANTS] == ["q5_0", "q5_1", "q8_0"]
    assert dividing("int4", 96) == "int4" and dividing("q5_0", 640) == "q5_0"


@pytest.mark.consumer
@pytest.mark.parametrize("name", [*IN_GGUF, "int8", "int4"])
def test_its_bytes_are_decoded_to_our_numbers(name):
    gguf = pytest.importorskip("gguf")
    fmt, x = FORMATS[name], uneven_rows()
    amax = x.abs().amax(1, keepdim=True)
    for tried in fmt.tried_scales(x, amax) if fmt.block else [fmt.scales(x, amax)]:
        codes = fmt.quantize(x, *tried)
        stored = blocks_of(WRITTEN[name], codes, *tried)
        assert stored.shape[-1] == (fmt.block_bytes or WRITTEN[name].size)
        assert name not in NAMES or stored.numel() == weight_bytes(x.shape, name, False, 0)
        kind = gguf.GGMLQuantizationType[WRITTEN[name].name]
        found = torch.from_numpy(np.array(gguf.quants.dequantize(stored.flatten(1).numpy(), kind)))
        assert torch.equal(found, fmt.dequantize(codes, *tried))


@pytest.mark.consumer
def test_a_file_of_each_type_has_a_name_of_llama_cpps():
    known = pytest.importorskip("gguf").LlamaFileType.__members__
    assert all(f"MOSTLY_{FILE_TYPES.get(kind.name, kind.name)}" in known for kind in WRITTEN.values())


def encoded_by_others(name: str, x: Tensor) -> dict[str, Tensor]:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    packing = pytest.importorskip("auto_round.export.export_to_gguf.packing")
    stored = {"auto-round": packing.ggml_quant(x.clone(), name, device="cpu")}
    if name not in K_QUANTS:
        stored["gguf"] = gguf.quants.quantize(x.numpy(), kind)
    return {
        tool: torch.from_numpy(np.array(gguf.quants.dequantize(np.asarray(each).reshape(len(x), -1), kind)))
        for tool, each in stored.items()
    }


@pytest.mark.slow
@pytest.mark.consumer
@pytest.mark.parametrize("name", IN_GGUF)
def test_the_search_errs_less_than_other_encoders(name, monkeypatch):
    """Of Gaussian numbers. Measured: 0.798, 0.888, 0.808, 0.877, 0.992, 0.981, 0.915 of auto-round's squared error."""
    if "datasets" not in sys.modules:  # auto-round imports it, for calibration alone
        monkeypatch.setitem(sys.modules, "datasets", MagicMock())
    x = 0.02 * drawn(256, 1024)
    codes, *scales = searched(x, name)
    ours = (FORMATS[name].dequantize(codes, *scales) - x).double().square().sum()
    for tool, theirs in encoded_by_others(name, x).items():
        assert ours < (theirs - x).double().square().sum(), tool
