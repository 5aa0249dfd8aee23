"""What all formats have in common."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.export.weights import SCALE_DTYPES
from sd_quant.quantization.formats import FORMATS, Format, fake_quantize

# Of Gaussian numbers with one range for all, relative to their norm; measured 0.0104, 0.0265, 0.1074, 0.1148, 0.0955.
# Theory has for int8 amax / 127 / sqrt(12), with an amax of 4.6 here, and for fp8 about 2^-4 / sqrt(6).
ERRORS = {"int8": (0.009, 0.012), "fp8": (0.025, 0.028), "int4": (0.10, 0.115), "mxfp4": (0.11, 0.12)}
ERRORS |= {"nvfp4": (0.09, 0.10)}


@pytest.fixture(params=FORMATS)
def name(request) -> str:
    return request.param


@pytest.fixture
def fmt(name) -> Format:
    return FORMATS[name]


def gaussian(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(64, 1024, generator=torch.Generator().manual_seed(seed)).to(dtype)


def largest(x: Tensor) -> Tensor:
    return x.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_loses_what_its_bits_cost_and_no_more(name, fmt, dtype):
    x = gaussian(dtype)
    before, found = x.clone(), fake_quantize(fmt, x, largest(x))
    assert found.dtype == torch.float32 and found.shape == x.shape and torch.equal(x, before)
    low, high = ERRORS[name]
    assert low < ((found - x.float()).norm() / x.float().norm()).item() < high


def test_codes_have_few_values_and_scales_are_fp32(name, fmt):
    x = gaussian()
    scales = fmt.scales(x, largest(x))
    codes = fmt.quantize(x, *scales)
    assert codes.shape == x.shape and codes.element_size() == 1
    assert len(codes.view(torch.uint8).unique()) <= 2**fmt.bits
    assert fmt.pack(codes).numel() * fmt.pack(codes).element_size() == x.numel() * fmt.bits // 8
    assert all(scale.dtype == torch.float32 for scale in scales)
    expected = () if fmt.block is None else (64, 1024 // fmt.block)
    assert scales[0].shape == expected and all(scale.shape == () for scale in scales[1:])


def test_what_was_dequantized_is_not_changed_again(fmt):
    x = gaussian()
    scales = fmt.scales(x, largest(x))
    once = fmt.dequantize(fmt.quantize(x, *scales), *scales)
    assert torch.equal(fmt.dequantize(fmt.quantize(once, *scales), *scales), once)


def test_not_even_with_scales_of_its_own(name, fmt):
    """But for nvfp4: E4M3 rounds the scale of the largest block's peak, so that the global scale is found anew."""
    x = gaussian()
    once = fake_quantize(fmt, x, largest(x))
    again = fake_quantize(fmt, once, largest(once))
    if name == "nvfp4":
        assert 0 < ((again - once).norm() / once.norm()).item() < 2.0**-11  # by rounding to fp16 alone
    else:
        assert torch.equal(again, once)


def test_zeros_stay_zeros(fmt):
    x = torch.zeros(2, 128)
    assert not fake_quantize(fmt, x, torch.tensor(0.0)).any()
    assert not fake_quantize(fmt, x, torch.tensor(3.0)).any()


def test_a_block_of_zeros_does_not_touch_the_others(fmt):
    x = gaussian()
    expected = fake_quantize(fmt, x, largest(x))
    x[5, 128:256] = expected[5, 128:256] = 0
    assert torch.equal(fake_quantize(fmt, x, largest(gaussian())), expected)


def test_numbers_that_blocks_do_not_divide_are_refused(fmt):
    if fmt.block is None:
        assert fake_quantize(fmt, torch.ones(2, 100), torch.tensor(1.0)).shape == (2, 100)
        return
    with pytest.raises(SdQuantError, match=f"100 numbers do not divide into blocks of {fmt.block}"):
        fmt.scales(torch.ones(2, 100), torch.tensor(1.0))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_range_without_end_is_refused(fmt, value):
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
    for index, (kind, scale) in enumerate(zip(fmt.onnx_scale_types, scales, strict=True)):
        stored.append((f"scale{index}", kind, scale.shape, scale.to(SCALE_DTYPES[kind])))
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


def test_onnx_computes_the_same_numbers_from_what_is_stored(fmt):
    """Exactly: its fp16 products are ours rounded to fp16."""
    x = gaussian()[:8]
    model = dequantizing(fmt, x, fmt.opset)
    onnx.checker.check_model(model, full_check=True)
    found = ReferenceEvaluator(model).run(None, {})[0]
    assert found.dtype == np.float16
    assert np.array_equal(found, fake_quantize(fmt, x, largest(x)).half().numpy())


def test_the_opset_is_the_first_that_has_these_types(fmt):
    model = dequantizing(fmt, gaussian()[:8], fmt.opset - 1)
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(model, full_check=True)


def test_every_format_has_the_arithmetic_that_its_facts_promise():
    for name, fmt in FORMATS.items():
        assert fmt.name == name and fmt.static_scale == (fmt.block is None)
        assert hasattr(fmt.arithmetic, "QMAX" if fmt.static_scale else "onnx_scale")
        assert fmt.modelopt_num_bits is None or fmt.static_scale
    assert {name for name, fmt in FORMATS.items() if fmt.needs_amax} == {"int8", "fp8", "nvfp4"}


def test_the_facts_of_formats_need_no_torch():
    code = "import sys, sd_quant.quantization.formats as f; sys.exit('torch' in sys.modules or len(f.FORMATS) < 5)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4]).returncode == 0
