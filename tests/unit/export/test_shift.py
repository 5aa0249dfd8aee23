"""A shifted convolution is asymmetric quantization with zeros around the image, computed without a zero point."""

from pathlib import Path

import modelopt.torch.opt as mto
import onnx.parser
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.engines import load_engine
from sd_quant.export.qdq import write_onnx
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.convolutions import with_shifted_bias
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.ranges import InputRange, with_ranges
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import between_roundings, save_quantized, simulate
from sd_quant.simulation.native import PRODUCTS, NativeConv, layer_of

pytestmark = pytest.mark.commit

INT8, CHANNELS, OUTPUTS = FORMATS["int8"], 5, 7
# kernel, stride, pads above, left, below and right, as ONNX orders them, dilation, whether an upsampler is in front
CASES = {
    "same": ((3, 3), 1, (1, 1, 1, 1), 1, False), "wide": ((3, 3), 1, (2, 2, 2, 2), 2, False),
    "downsampler": ((3, 3), 2, (1, 1, 1, 1), 1, False), "uneven padding": ((3, 3), 2, (0, 0, 1, 1), 1, False),
    "none": ((3, 3), 1, (0, 0, 0, 0), 1, False), "pointwise": ((1, 1), 1, (0, 0, 0, 0), 1, False),
    "oblong": ((3, 2), 1, (1, 0, 1, 1), 1, False), "upsampler": ((3, 3), 1, (1, 1, 1, 1), 1, True),
    "without bias": ((3, 3), 1, (1, 1, 1, 1), 1, False),
}  # fmt: skip


class Shifted:
    """A convolution, its assignment, and the graph of it that has not got its weights yet."""

    def __init__(self, case: str):
        kernel, self.stride, self.pads, self.dilation, self.upsampled = CASES[case]
        random = torch.Generator().manual_seed(0)
        self.weight = torch.randn(OUTPUTS, CHANNELS, *kernel, generator=random)
        self.bias = torch.randn(OUTPUTS, generator=random).half().float() if case != "without bias" else None
        layer = LayerAssignment("conv", "conv", tuple(self.weight.shape))
        layer = with_ranges(layer, self.weight, InputRange(2.0, -112), Recipe(3.0, None))
        self.layer = with_shifted_bias(layer, self.weight, self.bias)

    def graph(self) -> ir.Model:
        larger = 'Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">'
        sizes = f"pads = {[*self.pads]}, strides = {[self.stride] * 2}, dilations = {[self.dilation] * 2}"
        model = ir.from_proto(onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
            graph (float16[n,{CHANNELS},h,w] x, float16{[*self.weight.shape]} weight, float16[{OUTPUTS}] bias)
            => (float16[n,{OUTPUTS},a,b] y) <float[4] scales = {{1.0, 1.0, 2.0, 2.0}}> {{
                larger = {f"{larger} (x, , scales)" if self.upsampled else "Identity (x)"}
                made = Conv <{sizes}> (larger, weight{"" if self.bias is None else ", bias"})
                y = Identity (made)
            }}"""))  # fmt: skip
        if self.bias is None:
            model.graph.inputs.pop()
        for value in model.graph.inputs[1:]:
            value.name = f"conv.{value.name}"
        return model

    def write(self, path: Path) -> Path:
        read = {"conv.weight": self.weight, "conv.bias": self.bias}.__getitem__
        write_onnx(self.graph(), path, inputs=1, read=read, assignment={"conv": self.layer})
        return path

    def module(self) -> nn.ModuleDict:
        conv = nn.Conv2d(CHANNELS, OUTPUTS, self.weight.shape[2:], self.stride, self.pads[0], self.dilation)
        conv.weight.data, conv.bias.data = self.weight.clone(), self.bias
        return nn.ModuleDict({"conv": conv})

    def expected(self, x: Tensor) -> Tensor:
        """Codes with a zero point, zeros around the image, everything in double precision."""
        codes = torch.fake_quantize_per_tensor_affine(
            x, self.layer.activation_scale, self.layer.activation_zero_point, -128, 127
        )
        scale = per_channel(self.layer.weight_scale, self.weight)
        weight = INT8.dequantize(INT8.quantize(self.weight, scale), scale).double()
        codes = F.interpolate(codes, scale_factor=2.0) if self.upsampled else codes
        above, left, below, right = self.pads
        padded = F.pad(codes.double(), (left, right, above, below))
        bias = None if self.bias is None else self.bias.double()
        return F.conv2d(padded, weight, bias, self.stride, 0, self.dilation)


def image(height: int = 9, width: int = 6) -> Tensor:
    """Numbers that no error of fp16 moves from one code to the next: a quarter of a step from their own."""
    random = torch.Generator().manual_seed(1)
    scale = torch.tensor(2.0 / 127).half().float()
    return ((torch.randint(-16, 240, (2, CHANNELS, height, width), generator=random) + 0.25) * scale).half().float()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("case", CASES)
def test_the_graph_computes_it_at_every_size(case, engine, tmp_path):
    """fp16 rounds the output (2^-11 of it), and the bias with what a scale's choice leaves of that."""
    shifted = Shifted(case)
    loaded = load_engine(engine, shifted.write(tmp_path / "conv.onnx"))
    for x in (image(), image(4, 5)):
        assert relative_error(shifted.expected(x), loaded(x=x)["y"].double()) < 5e-4  # much of it is border


@pytest.mark.parametrize("case", ["same", "wide", "downsampler", "none", "pointwise"])
def test_modelopts_quantizer_and_torchs_own_products_compute_it_and_a_checkpoint_keeps_it(case, tmp_path):
    """To what the dtype rounds off the output: a shift is subtracted in fp32, whatever the input comes in."""
    shifted = Shifted(case)
    made = layer_of(shifted.module()["conv"], shifted.layer, PRODUCTS["cpu"])
    assert isinstance(made, NativeConv)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 5e-4), (torch.bfloat16, 3e-3)):
        x = image().to(dtype)
        assert relative_error(shifted.expected(x.float()), made(x).double()) < tolerance
    simulated = simulate(shifted.module(), {"conv": shifted.layer})
    for x in (image(), between_roundings(simulated["conv"], image())):
        assert relative_error(shifted.expected(image()), simulated["conv"](x).double()) < 1e-5
    save_quantized(simulated, tmp_path / "quantized.pt")
    restored = shifted.module()
    mto.restore(restored, tmp_path / "quantized.pt")
    assert torch.equal(restored["conv"](image()), simulated["conv"](image()))
