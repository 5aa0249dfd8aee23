import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from sd_quant.quantization.formats.int8 import SMALLEST_SCALE, per_channel, quantize, scale_of


def onnx_quantize(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """ONNX's own definition of QuantizeLinear, per output channel."""
    node = helper.make_node("QuantizeLinear", ["weight", "scale", "zero"], ["q"], axis=0)
    ports = [("weight", TensorProto.FLOAT, weight), ("scale", TensorProto.FLOAT, scale)]
    inputs = [helper.make_tensor_value_info(name, kind, array.shape) for name, kind, array in ports]
    inputs.append(helper.make_tensor_value_info("zero", TensorProto.INT8, scale.shape))
    output = helper.make_tensor_value_info("q", TensorProto.INT8, weight.shape)
    graph = helper.make_graph([node], "quantize", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.checker.check_model(model, full_check=True)
    feeds = {"weight": weight, "scale": scale, "zero": np.zeros(scale.shape, np.int8)}
    return ReferenceEvaluator(model).run(None, feeds)[0]


@pytest.mark.parametrize("shape", [(16, 64), (16, 8, 3, 3)])
def test_weights_are_quantized_as_onnx_would(shape):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=random) * torch.rand(16, generator=random).view(-1, *[1] * (len(shape) - 1))
    scale = scale_of(weight.flatten(1).abs().amax(1))
    # the first channel: halves, which round to the even neighbour, and values beyond the range on both sides
    weight[0] = ((torch.arange(weight[0].numel()) - weight[0].numel() // 2) * 4.5).view(shape[1:])
    scale[0] = 1.0
    ours = quantize(weight, per_channel(scale, weight))
    assert ours.dtype == torch.int8 and {-128, 127, 4, 14, -14} <= set(ours[0].flatten().tolist())
    assert np.array_equal(ours.numpy(), onnx_quantize(weight.numpy(), scale.numpy()))


def test_no_weight_is_further_than_half_a_step_and_what_rounding_the_scale_costs():
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    scale = scale_of(weight.abs().amax(1))
    error = (quantize(weight, per_channel(scale, weight)) * per_channel(scale, weight) - weight).abs()
    assert (error <= scale[:, None] * (0.5 + 127 * 2.0**-11)).all()  # fp16 keeps 11 bits of the scale


@pytest.mark.parametrize(
    "amax, expected",
    [
        (127.0, 1.0),
        (0.0, 1.0),
        (127 * 2.0**-14, 2.0**-14),
        (1e-30, SMALLEST_SCALE),
        (127 * 65504.0, 65504.0),
        (127 * (1 + 2.0**-12), 1.0),  # rounded to fp16
    ],
)
def test_scales_are_fp16_numbers_in_fp32(amax, expected):
    scale = scale_of(torch.tensor([amax]))
    assert scale.dtype == torch.float32 and scale.tolist() == [expected]


def test_zero_channels_do_not_touch_the_others():
    assert scale_of(torch.tensor([0.0, 254.0, 0.0])).tolist() == [1, 2, 1]


@pytest.mark.parametrize("amax", [127 * 65536.0, float("inf"), float("nan")])
def test_a_scale_that_fp16_cannot_hold_is_refused(amax):
    with pytest.raises(OverflowError, match="fp16 cannot hold"):
        scale_of(torch.tensor([1.0, amax]))
