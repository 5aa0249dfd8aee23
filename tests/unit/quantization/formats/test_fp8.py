"""FP8 against ml_dtypes' E4M3, NVIDIA ModelOpt's quantizer and ONNX's own definition."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.fp8 import QMAX, dequantize, pack, quantize, scales

ONE = torch.tensor(1.0)


def every_fp16_number() -> Tensor:
    """fp32, without infinity and NaN. E4M3 numbers, what lies halfway between two, and signed zeros are among them."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    return numbers[numbers.isfinite()]


def test_codes_are_the_bit_patterns_of_ml_dtypes():
    x = every_fp16_number()
    x = x[x.abs() <= QMAX]
    assert len(x) > 40000
    expected = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(pack(quantize(x, ONE)).numpy(), expected)
    assert len(set(expected.tolist())) == 254  # all but the two NaNs


def test_what_is_too_large_stays_448_where_a_plain_cast_makes_nan():
    x = torch.tensor([448.5, 464.0, 465.0, 1e4, 1e30, float("inf")])
    x = torch.cat([x, -x])
    assert quantize(x, ONE).float().tolist() == [448.0] * 6 + [-448.0] * 6
    assert np.isnan(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).any()


@pytest.fixture(scope="module", params=[None, 0], ids=["per tensor", "per channel"])
def axis(request) -> int | None:
    return request.param


@pytest.fixture(scope="module")
def weight_and_scale(axis) -> tuple[Tensor, Tensor]:
    """Channels of very different ranges; some numbers are twice what calibration saw."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=random) * torch.logspace(-4, 1, 32)[:, None]
    amax = weight.abs().amax() if axis is None else weight.abs().amax(1, keepdim=True)
    weight[:, ::50] *= 2
    return weight, scales(weight, amax)[0]


def test_it_is_modelopts_fake_quantization(weight_and_scale, axis):
    """ModelOpt multiplies with a reciprocal where we divide: fp32's last bits differ, no number takes another code."""
    weight, scale = weight_and_scale
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3), axis=axis))
    quantizer.amax = scale * QMAX
    ours = dequantize(quantize(weight, scale), scale)
    torch.testing.assert_close(ours, quantizer(weight), rtol=2.0**-21, atol=0)
    assert not torch.equal(ours, weight)


def test_it_is_onnxs_pair(weight_and_scale, axis):
    weight, scale = weight_and_scale
    scale_shape = [] if axis is None else [len(weight)]
    along = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"], **along),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"], **along),
    ]
    graph = helper.make_graph(
        nodes,
        "pair",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, weight.shape),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, scale_shape),
            helper.make_tensor_value_info("zero", TensorProto.FLOAT8E4M3FN, scale_shape),
        ],
        [
            helper.make_tensor_value_info("codes", TensorProto.FLOAT8E4M3FN, weight.shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, weight.shape),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", FORMATS["fp8"].opset)])
    onnx.checker.check_model(model, full_check=True)
    feeds = {
        "x": weight.numpy(),
        "scale": scale.view(scale_shape).numpy(),
        "zero": np.zeros(scale_shape, ml_dtypes.float8_e4m3fn),
    }
    codes, y = ReferenceEvaluator(model).run(None, feeds)
    ours = quantize(weight, scale)
    assert np.array_equal(pack(ours).numpy(), codes.view(np.uint8))
    assert np.array_equal(dequantize(ours, scale).numpy(), y)
