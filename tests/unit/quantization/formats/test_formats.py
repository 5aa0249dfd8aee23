"""What all formats have in common, those of NVIDIA ModelOpt and of ONNX; integers by hand and by ml_dtypes' packing."""

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.places import HOME
from sd_quant.quantization.formats import FORMATS, Format, fake_quantize
from sd_quant.quantization.formats.blocks import pack_nibbles, per_channel
from sd_quant.quantization.formats.integers import INT4, SMALLEST_SCALE, scale_of
from tests.layers import drawn

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
    """A model of what the format stores, with DequantizeLinear of its types and fp16 for an output."""
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
    """Those of a transposed weight in its own order."""
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    for given in (codes, codes.movedim(0, -1)):
        stored = numpy_helper.from_array(np.ascontiguousarray(given.numpy()).astype(ml_dtypes.int4))
        assert pack_nibbles(given).numpy().tobytes() == stored.raw_data
