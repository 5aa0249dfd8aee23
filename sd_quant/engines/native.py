"""Quantized layers computed by torch itself: INT8 and FP8 matrix products of the processor, no file in between.

It answers what a format costs and gains where there is torch and nothing else, and compiled what PyTorch makes of it.
Linears multiply their codes (``torch._int_mm``, ``torch._scaled_mm``). Convolutions have no such kernel in torch, so
they are computed in the model's precision with rounded numbers, and gain nothing. The road not taken is torchao, whose
quantizers choose scales of their own.
"""

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.errors import ResourceError
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.simulate import rewrite

CAPABILITY = {"int8": (7, 5), "fp8": (8, 9)}  # of GPUs that multiply these
FEWEST_ROWS = 17  # that CUDA's INT8 product takes


class NativeLinear(nn.Module):
    """A linear whose weight and input are codes of one static format. ``weight`` [out, in] is smoothed, fp32."""

    codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    pre_quant_scale: Tensor | None

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment):
        super().__init__()
        form = FORMATS[layer.format]
        (weight_scale,) = layer.weight_scales(weight)
        self.format, self.bias = layer.format, bias
        self.register_buffer("codes", form.quantize(weight, weight_scale))
        self.register_buffer("weight_scale", weight_scale.flatten())
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))
        multiplies = layer.pre_quant_scale.half().to(weight) if layer.multiplies else None
        self.register_buffer("pre_quant_scale", multiplies)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x if self.pre_quant_scale is None else x * self.pre_quant_scale).flatten(0, -2)
        codes = FORMATS[self.format].quantize(rows, self.input_scale)
        output = PRODUCTS[self.format](codes, self, x.dtype)
        return (output if self.bias is None else output + self.bias).unflatten(0, x.shape[:-1])


def int8_product(codes: Tensor, linear: NativeLinear, dtype: torch.dtype) -> Tensor:
    """Exact in int32, scaled in fp32."""
    missing = max(0, FEWEST_ROWS - len(codes))
    product = torch._int_mm(F.pad(codes, (0, 0, 0, missing)), linear.codes.T)[: len(codes)]
    return (product * (linear.input_scale.float() * linear.weight_scale.float())).to(dtype)


def fp8_product(codes: Tensor, linear: NativeLinear, dtype: torch.dtype) -> Tensor:
    """One scale for the weight; the sums are fp32 and rounded to ``dtype``."""
    input_scale, weight_scale = linear.input_scale.float(), linear.weight_scale.float().squeeze()
    return torch._scaled_mm(codes, linear.codes.T, input_scale, weight_scale, out_dtype=dtype)


PRODUCTS = {"int8": int8_product, "fp8": fp8_product}


class RoundedConv(nn.Module):
    """A convolution of rounded numbers. ``weight`` fp32."""

    input_amax: Tensor

    def __init__(self, conv, weight: Tensor, layer: LayerAssignment):
        super().__init__()
        form = FORMATS[layer.format]
        scales = layer.weight_scales(weight)
        self.format, self.bias = layer.activation_format, conv.bias
        rounded = form.dequantize(form.quantize(weight, *scales), *scales).to(conv.weight)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        self.register_buffer("input_amax", torch.tensor(layer.activation_amax, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        near = fake_quantize(FORMATS[self.format], x, self.input_amax).to(x)
        return F.conv2d(near, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@torch.no_grad()
def with_native_layers(unet: nn.Module, assignment: Mapping[str, LayerAssignment]) -> nn.Module:
    """``unet``, smoothed and with its quantized layers replaced, in place.

    Not what ``simulate`` makes of it: ModelOpt's modules, even idle ones, break what a compiler could join.
    """
    rewrite(unet, assignment)
    for layer in assignment.values():
        if layer.format is None:
            continue
        parent, _, name = layer.name.rpartition(".")
        module = unet.get_submodule(layer.name)
        weight = module.get_parameter("weight").detach().float()
        made = RoundedConv(module, weight, layer) if weight.ndim > 2 else NativeLinear(weight, module.bias, layer)
        setattr(unet.get_submodule(parent), name, made)
    return unet


def check_device(formats: Collection[str]) -> None:
    """Raises ResourceError when this machine's GPU has no matrix product for a format. A CPU has all of them."""
    if not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability()
    for name in formats:
        if found < CAPABILITY[name]:
            raise ResourceError(
                f"torch multiplies {name} on GPUs of compute capability {'.'.join(map(str, CAPABILITY[name]))} or more "
                f"and this one has {'.'.join(map(str, found))}; choose another preset or infer=openvino"
            )
