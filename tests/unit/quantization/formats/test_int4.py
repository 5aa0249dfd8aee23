"""INT4 against NVIDIA ModelOpt's block quantization, ml_dtypes' packing and ONNX's DequantizeLinear."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.int4 import BLOCK, QMAX, dequantize, pack, quantize, scales


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """Blocks of very different ranges, one of zeros."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 4, BLOCK, generator=random) * torch.logspace(-3, 2, 128).view(32, 4, 1)
    weight[3, 2] = 0
    return weight.flatten(1)


def test_a_block_worked_by_hand():
    block = torch.tensor([14.0, -14.0, 1.0, 3.0, 0.9, 5.0] + [0.0] * (BLOCK - 6))
    (scale,) = scales(block, torch.tensor(0.0))
    assert scale.tolist() == [2.0]
    assert quantize(block, scale).tolist()[:6] == [7, -7, 0, 2, 0, 2]  # 0.5 and 2.5 go to the even neighbour
    assert dequantize(quantize(block, scale), scale).tolist()[:6] == [14, -14, 0, 4, 0, 4]


def test_scales_are_fp16_numbers_and_the_seventh_of_their_blocks_range(weight):
    (scale,) = scales(weight, torch.tensor(float("nan")))  # the range of the whole does not matter
    assert scale.shape == (32, 4) and torch.equal(scale, scale.half().float())
    expected = weight.view(32, 4, BLOCK).abs().amax(-1).numpy().astype(np.float64) / 7
    expected[3, 2] = 1
    np.testing.assert_allclose(scale.numpy(), expected, rtol=2.0**-11)


def test_it_is_modelopts_block_quantization(weight):
    """Given our fp16 scales; it multiplies with a reciprocal where we divide, so fp32's last bits differ."""
    (scale,) = scales(weight, weight.abs().max())
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=4, block_sizes={-1: BLOCK}))
    quantizer.amax = (scale * QMAX).view(-1, 1)
    ours = dequantize(quantize(weight, scale), scale)
    torch.testing.assert_close(ours, quantizer(weight), rtol=2.0**-21, atol=0)
    assert not torch.equal(ours, weight)


def test_codes_are_packed_as_onnx_packs_them():
    assert pack(torch.tensor([1, -2, 7], dtype=torch.int8)).tolist() == [0xE1, 0x07]
    for shape in ((16,), (3, 5), (2, 3, 5)):  # the last two of an odd number
        codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        stored = numpy_helper.from_array(codes.numpy().astype(ml_dtypes.int4))
        assert pack(codes).numpy().tobytes() == stored.raw_data


def test_a_transposed_weight_is_packed_in_its_own_order():
    codes = torch.arange(-8, 8, dtype=torch.int8).view(4, 4)
    stored = numpy_helper.from_array(np.ascontiguousarray(codes.T.numpy()).astype(ml_dtypes.int4))
    assert pack(codes.T).numpy().tobytes() == stored.raw_data


def test_onnx_reads_the_same_numbers_from_the_bytes(weight):
    (scale,) = scales(weight, weight.abs().max())
    codes = quantize(weight, scale)
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["codes", "scale"], ["y"], axis=1, block_size=BLOCK)],
        "dequantize",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, weight.shape)],
        [
            helper.make_tensor("codes", TensorProto.INT4, weight.shape, pack(codes).numpy().tobytes(), raw=True),
            numpy_helper.from_array(scale.numpy(), "scale"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", FORMATS["int4"].opset)])
    onnx.checker.check_model(model, full_check=True)
    assert np.array_equal(ReferenceEvaluator(model).run(None, {})[0], dequantize(codes, scale).numpy())


def test_no_number_is_further_than_half_a_step_and_what_rounding_the_scale_costs(weight):
    (scale,) = scales(weight, weight.abs().max())
    error = (dequantize(quantize(weight, scale), scale) - weight).abs().view(32, 4, BLOCK)
    assert (error <= scale[..., None] * (0.5 + QMAX * 2.0**-11)).all()  # fp16 keeps 11 bits of the scale
