"""Quantized layers computed by torch itself: INT8 and FP8 products of the processor, no file in between.

It answers what a format costs and gains where there is torch and nothing else, and compiled what PyTorch makes of it.
A layer is codes and scales, and a product that multiplies codes: torch's own (``torch._int_mm``, ``torch._scaled_mm``)
or, on a GPU, where torch has none or leaves int32 sums behind, ours (product_kernel.py). ``PRODUCTS`` says which, by
where it is computed. A convolution is a matrix product of unfolded codes; where that is slower than a convolution of
rounded numbers in the model's own precision, it is the latter, and gains nothing. The road not taken is torchao, whose
quantizers choose scales of their own.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.devices import CPU
from sd_quant.errors import ResourceError
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.rewrite import rewrite

FEWEST_ROWS = 17  # that CUDA's INT8 product takes
ALIGNED = 16  # CUDA's FP8 product takes multiples of it


class NativeLayer(nn.Module):
    """What is multiplied: ``codes`` of the weight [N, K], of a convolution in the order of height, width and channels,
    and ``scale`` fp32 [N], that of a product of codes. ``weight`` [N, C, ...] is smoothed, fp32."""

    codes: Tensor
    scale: Tensor
    weight_scale: Tensor
    largest: Tensor  # of the weight's scales
    input_scale: Tensor
    pre_quant_scale: Tensor | None

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment, product: "Product"):
        super().__init__()
        (weight_scale,) = layer.weight_scales(weight)
        self.format, self.bias, self.product = layer.format, bias, product
        self.register_buffer("codes", FORMATS[layer.format].quantize(weight, weight_scale).movedim(1, -1).flatten(1))
        self.register_buffer("weight_scale", weight_scale.float().flatten())
        self.register_buffer("largest", self.weight_scale.max())
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))
        self.register_buffer("scale", (self.input_scale * self.weight_scale).expand(len(weight)).contiguous())
        multiplies = layer.pre_quant_scale.half().to(weight) if layer.multiplies else None
        self.register_buffer("pre_quant_scale", multiplies)

    def quantized(self, x: Tensor) -> Tensor:
        """``x`` [..., C] as codes."""
        smoothed = x if self.pre_quant_scale is None else x * self.pre_quant_scale
        return FORMATS[self.format].quantize(smoothed, self.input_scale)


class NativeLinear(NativeLayer):
    """``product`` takes codes [M, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.quantized(x).flatten(0, -2), self, x.dtype).unflatten(0, x.shape[:-1])


class NativeConv(NativeLayer):
    """``product`` takes codes [B, H, W, C] and gives [B, H', W', N]."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, layer: LayerAssignment, product: "Product"):
        super().__init__(weight, conv.bias, layer, product)
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride[0], conv.dilation[0]
        self.padding = int(conv.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        codes = self.quantized(x.movedim(1, -1)).contiguous()
        return self.product(codes, self, x.dtype).movedim(-1, 1)


class RoundedConv(nn.Module):
    """A convolution of rounded numbers. ``weight`` fp32."""

    input_scale: Tensor

    def __init__(self, conv, weight: Tensor, layer: LayerAssignment):
        super().__init__()
        form = FORMATS[layer.format]
        scales = layer.weight_scales(weight)
        self.format, self.bias = layer.activation_format, conv.bias
        rounded = form.dequantize(form.quantize(weight, *scales), *scales).to(conv.weight)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        form = FORMATS[self.format]
        near = form.dequantize(form.quantize(x, self.input_scale), self.input_scale).to(x)
        return F.conv2d(near, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


# --------------------------------------------------------------------------------------------------------- products

Product = Callable[[Tensor, Any, torch.dtype], Tensor]  # of codes and a layer's


def int_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Exact in int32, scaled in fp32."""
    missing = max(0, FEWEST_ROWS - len(codes))
    product = torch._int_mm(F.pad(codes, (0, 0, 0, missing)), layer.codes.T)[: len(codes)]
    return with_bias((product * layer.scale).to(dtype), layer)


def scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Sums in fp32, or what the GPU's fast accumulation makes of it, scaled and rounded to ``dtype``.

    Scales per row of the weight are multiplied afterwards, relative to the largest: torch itself takes them on few GPUs
    and in bfloat16 alone.
    """
    per_row = layer.weight_scale.numel() > 1
    inside = layer.bias if dtype != torch.float32 and not per_row else None  # CUDA adds none to fp32
    output = torch._scaled_mm(
        codes, layer.codes.T, layer.input_scale, layer.largest, bias=inside, out_dtype=dtype, use_fast_accum=True
    )
    if per_row:
        output = output * (layer.weight_scale / layer.largest).to(dtype)
    return output if inside is not None else with_bias(output, layer)


def with_bias(output: Tensor, layer: NativeLayer) -> Tensor:
    return output if layer.bias is None else output + layer.bias


def unfolded_int_mm(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    """Every window a row, in the order of the weight: its height, its width, its channels."""
    windows = F.pad(codes, (0, 0, *4 * [conv.padding]))
    for axis, size in enumerate(conv.kernel_size, start=1):
        span = conv.dilation * (size - 1) + 1
        windows = windows.unfold(axis, span, conv.stride)[..., :: conv.dilation]
    rows = windows.movedim(3, -1)  # [B, H', W', KH, KW, C]
    return int_mm(rows.flatten(3).flatten(0, 2), conv, dtype).unflatten(0, rows.shape[:3])


def kernel_linear(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """As a convolution of one by one."""
    rows, weight = codes[:, None, None], layer.codes[:, None, None]
    return torch.ops.sd_quant.product(rows, weight, layer.scale, layer.bias, 1, 0, 1, dtype)[:, 0, 0]


def kernel_convolution(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    weight, place = conv.codes.unflatten(1, (*conv.kernel_size, -1)), (conv.stride, conv.padding, conv.dilation)
    return torch.ops.sd_quant.product(codes, weight, conv.scale, conv.bias, *place, dtype)


def aligned_scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """``scaled_mm`` where its sizes suit CUDA."""
    unfit = any(size % ALIGNED for size in layer.codes.shape)
    return kernel_linear(codes, layer, dtype) if unfit else scaled_mm(codes, layer, dtype)


@dataclass(frozen=True)
class Products:
    """Of one format on one kind of device; without one for convolutions they are ``RoundedConv``."""

    linear: Product
    convolution: Product | None


# By device and by the ONNX type of the codes. FP8 on a processor is no faster than fp32, unfolded slower;
# benchmarks/convolutions.py
PRODUCTS = {
    "cpu": {"INT8": Products(int_mm, unfolded_int_mm), "FLOAT8E4M3FN": Products(scaled_mm, None)},
    "cuda": {
        "INT8": Products(kernel_linear, kernel_convolution),
        "FLOAT8E4M3FN": Products(aligned_scaled_mm, kernel_convolution),
    },
}


def layer_of(module: nn.Module, layer: LayerAssignment, products: Mapping[str, Products]) -> nn.Module:
    """What computes ``module``, whose weight is smoothed already."""
    weight, found = module.get_parameter("weight").detach().float(), products[FORMATS[layer.format].onnx_type]
    if isinstance(module, nn.Conv2d):
        square = all(len(set(sizes)) == 1 for sizes in (module.stride, module.dilation, module.padding))
        if found.convolution is None or module.groups > 1 or not square:
            return RoundedConv(module, weight, layer)
        return NativeConv(module, weight, layer, found.convolution)
    return NativeLinear(weight, module.bias, layer, found.linear)


@torch.no_grad()
def with_native_layers(
    unet: nn.Module,
    assignment: Mapping[str, LayerAssignment],
    device: torch.device = CPU,
    products: Mapping[str, Products] | None = None,
) -> nn.Module:
    """``unet``, smoothed and with its quantized layers replaced, in place, to be computed on ``device``.

    ``products``: other than the device's own. Not what ``simulate`` makes of it: ModelOpt's modules, even idle ones,
    break what a compiler could join.
    """
    if device.type == "cuda":
        import sd_quant.simulation.product_kernel  # noqa: F401  # its operator exists from here on
    rewrite(unet, assignment)
    for layer in assignment.values():
        if layer.format is None:
            continue
        parent, _, name = layer.name.rpartition(".")
        made = layer_of(unet.get_submodule(layer.name), layer, products or PRODUCTS[device.type])
        setattr(unet.get_submodule(parent), name, made)
    return unet


def check_device(formats: Collection[str]) -> None:
    """Raises ResourceError when this machine's GPU has no product for a format. A CPU has all of them."""
    if not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability()
    for name in formats:
        needed = FORMATS[name].torch_compute_capability
        if found < needed:
            raise ResourceError(
                f"torch multiplies {name} on GPUs of compute capability {'.'.join(map(str, needed))} or more "
                f"and this one has {'.'.join(map(str, found))}; choose another preset or infer=openvino"
            )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            f"torch's INT8 and FP8 layers on a GPU need the package triton ({error}), which comes with torch for "
            "NVIDIA GPUs; install it: pip install triton"
        ) from error
