"""Quantized layers in torch that store INT8, FP8 or 4-bit weights and multiply INT8 or FP8, without an export.

A layer holds codes (quantized values), scales and a function that multiplies codes: torch's (``torch._int_mm``,
``torch._scaled_mm``) or a Triton kernel (``kernels``), see ``PRODUCTS``. A convolution is a matrix product of unfolded
codes or a Triton kernel, or, where these are slower, a convolution of dequantized numbers in the model's precision,
with no gain in speed. Alternative not taken: torchao, whose quantizers choose their own scales.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_quant.devices import CPU, best_device
from sd_quant.errors import ResourceError
from sd_quant.quantization.assignment import LayerAssignment, token_amax
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated, rotation_matrix
from sd_quant.simulation.rewrite import rewrite

INT8_MIN_ROWS, INT8_MULTIPLE = 17, 8  # the fewest rows that torch._int_mm multiplies on CUDA, and what divides sizes
FP8_MULTIPLE = 16  # the same of torch._scaled_mm


def own_factors(layer: LayerAssignment, weight: Tensor) -> Tensor | None:
    """Return ``pre_quant_scale`` in fp16 as in the graph; None if there is none or an earlier layer absorbed it."""
    return layer.pre_quant_scale.half().to(weight) if layer.multiplies else None


class NativeLayer(nn.Module):
    """A layer with quantized weight and input: weight codes, scales, and the ``product`` function of both codes.

    In all constructors here, ``weight``, fp32 [N outputs, C inputs, ...], is smoothed and not yet rounded.
    """

    codes: Tensor  # [N, K]; K of a convolution runs over height, width and channels
    weight_scale: Tensor  # fp32, [N] or [1]
    max_weight_scale: Tensor  # fp32, a scalar
    input_scale: Tensor  # fp32, a scalar
    scale: Tensor  # fp32 [N], of a product of two codes
    pre_quant_scale: Tensor | None  # [C], see ``own_factors``
    matrix: Tensor | None  # fp32, rotates groups of a linear's inputs

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment, product: "Product"):
        super().__init__()
        codes, (weight_scale,) = layer.codes_and_scales(weight)
        self.format, self.bias, self.product = layer.format, bias, product
        self.shift = layer.shift  # a float, so that no call waits for a GPU
        self.saturates = int_mm_saturates()  # a constant to torch.compile
        self.zero_point = layer.activation_zero_point
        self.register_buffer("codes", codes.movedim(1, -1).flatten(1))
        self.register_buffer("weight_scale", weight_scale.float().flatten())
        self.register_buffer("max_weight_scale", self.weight_scale.max())
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))
        self.register_buffer("scale", (self.input_scale * self.weight_scale).expand(len(weight)).contiguous())
        self.register_buffer("pre_quant_scale", own_factors(layer, weight))
        self.register_buffer("matrix", rotation_matrix(layer.rotation).to(weight) if layer.rotation else None)

    def smoothed(self, x: Tensor) -> Tensor:
        """Smooth and rotate an input [..., C] in fp32 (bf16 has too few bits), if the layer does; else return it."""
        smoothed = x if self.pre_quant_scale is None else x.float() * self.pre_quant_scale
        if self.matrix is None:
            return smoothed
        return (smoothed.float().unflatten(-1, (-1, len(self.matrix))) @ self.matrix).flatten(-2)

    def quantized(self, smoothed: Tensor) -> Tensor:
        """Quantize a smoothed input [..., C], after subtracting the layer's shift."""
        shifted = smoothed.float() - self.shift if self.shift else smoothed
        return FORMATS[self.format].quantize(shifted, self.input_scale)


class NativeLinear(NativeLayer):
    """A linear with a static input scale; ``product`` maps quantized inputs [M tokens, C] to outputs [M, N]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(self.smoothed(x), x.dtype)

    def multiplied(self, smoothed: Tensor, dtype: torch.dtype) -> Tensor:
        return self.product(self.quantized(smoothed).flatten(0, -2), self, dtype).unflatten(0, smoothed.shape[:-1])


class PerTokenLinear(nn.Module):
    """A linear with a dynamic scale per token: its largest magnitude divides the input and multiplies the output."""

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment, product: "Product"):
        super().__init__()
        self.linear, self.bias = NativeLinear(weight, None, layer, product), bias

    def forward(self, x: Tensor) -> Tensor:
        smoothed = self.linear.smoothed(x).float()
        largest = token_amax(smoothed)
        output = self.linear.multiplied(smoothed / largest, torch.float32) * largest
        return (output if self.bias is None else output + self.bias).to(x.dtype)


class NativeConv(NativeLayer):
    """A quantized convolution; ``product`` maps quantized inputs [B, H, W, C] to outputs [B, H', W', N]."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, layer: LayerAssignment, product: "Product"):
        super().__init__(weight, conv.bias, layer, product)
        if layer.bias is not None:
            del self.bias
            self.register_buffer("bias", layer.bias.to(weight))  # fp32, because it is much larger than the output
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride[0], conv.dilation[0]
        self.padding = int(conv.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        codes = self.quantized(x.movedim(1, -1)).contiguous()  # a convolution's input is not smoothed
        return self.product(codes, self, x.dtype).movedim(-1, 1)


class RoundedConv(nn.Module):
    """A convolution that fake-quantizes its input and weight and computes in the model's own precision."""

    input_scale: Tensor  # fp32, a scalar

    def __init__(self, conv, weight: Tensor, layer: LayerAssignment):
        super().__init__()
        self.format, self.bias, self.shift = layer.activation_format, conv.bias, layer.shift
        self.weight = nn.Parameter(layer.rounded_weight(weight).to(conv.weight), requires_grad=False)
        self.geometry = conv.stride, conv.padding, conv.dilation, conv.groups
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        fmt = FORMATS[self.format]
        codes = fmt.quantize(x.float() - self.shift if self.shift else x, self.input_scale)
        fake_quantized = (fmt.dequantize(codes, self.input_scale) + self.shift).to(x)
        return F.conv2d(fake_quantized, self.weight, self.bias, *self.geometry)


class WeightOnly(nn.Module):
    """A linear or convolution with inputs in high precision and a quantized weight, dequantized in every call."""

    codes: Tensor  # one row, 4-bit codes two to a byte
    pre_quant_scale: Tensor | None  # see ``own_factors``

    def __init__(self, module, weight: Tensor, layer: LayerAssignment):
        super().__init__()
        rows, fmt = weight.flatten(1), FORMATS[layer.format]
        codes, scales = layer.codes_and_scales(rows)
        self.format, self.bias, self.rotation = layer.format, module.bias, layer.rotation
        self.shape, self.rows = weight.shape, rows.shape
        self.register_buffer("codes", fmt.pack(codes))
        for scale, kind, dtype in zip(scales, fmt.onnx_scale_types, fmt.scale_dtypes, strict=True):
            self.register_buffer(f"{kind.lower()}_scale", scale.to(dtype))
        self.register_buffer("pre_quant_scale", own_factors(layer, weight))
        is_conv = isinstance(module, nn.Conv2d)
        self.geometry = (module.stride, module.padding, module.dilation, module.groups) if is_conv else None

    def dequantized(self) -> Tensor:
        """Dequantize the stored weight, fp32, in its original shape."""
        fmt = FORMATS[self.format]
        scales = (getattr(self, f"{kind.lower()}_scale").float() for kind in fmt.onnx_scale_types)
        codes = fmt.unpack(self.codes.flatten())[: self.rows.numel()]
        return rotated(fmt.dequantize(codes.view(self.rows), *scales), self.rotation).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        smoothed = x if self.pre_quant_scale is None else (x.float() * self.pre_quant_scale).to(x)
        weight = self.dequantized().to(x)
        if self.geometry is None:
            return F.linear(smoothed, weight, self.bias)
        return F.conv2d(smoothed, weight, self.bias, *self.geometry)


Product = Callable[[Tensor, Any, torch.dtype], Tensor]  # codes of an input, a layer, the dtype of the output


def int_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Multiply INT8 codes exactly with torch (fp64 on CPUs whose INT8 sums saturate), then scale and bias in fp32."""
    if layer.saturates and codes.device.type == "cpu":
        product = (codes.double() @ layer.codes.T.double()).float()
    else:
        missing = max(0, INT8_MIN_ROWS - len(codes))
        outputs, inputs = (-size % INT8_MULTIPLE for size in layer.codes.shape)
        weight = F.pad(layer.codes, (0, inputs, 0, outputs)) if outputs or inputs else layer.codes
        product = torch._int_mm(F.pad(codes, (0, inputs, 0, missing)), weight.T)[: len(codes), : len(layer.codes)]
    return add_bias(product * layer.scale, layer).to(dtype)


@cache
def int_mm_saturates() -> bool:
    """Test whether torch's INT8 product overflows on this CPU: without VNNI, oneDNN adds two products in 16 bits."""
    largest = torch.full((INT8_MIN_ROWS, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.T) != 64 * 127**2).any())


def scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 codes with torch, summed in fp32 or by the GPU's fast accumulation, then rounded to ``dtype``.

    torch supports a scale per output channel on few GPUs and in bfloat16 only, so it multiplies with the largest scale,
    and the output is then multiplied by each channel's ratio to that scale.
    """
    per_row = layer.weight_scale.numel() > 1
    fused_bias = layer.bias if dtype != torch.float32 and not per_row else None  # CUDA adds none to fp32
    scales = layer.input_scale, layer.max_weight_scale
    output = torch._scaled_mm(codes, layer.codes.T, *scales, bias=fused_bias, out_dtype=dtype, use_fast_accum=True)
    if per_row:
        output = output * (layer.weight_scale / layer.max_weight_scale).to(dtype)
    return output if fused_bias is not None else add_bias(output, layer)


def dequantized_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Multiply codes as fp32 numbers, with no gain in speed.

    torch's own FP8 product on a CPU gives the same result, but with AMX a thousand times as slow (oneDNN's reference).
    """
    return add_bias((codes.float() @ layer.codes.float().T) * layer.scale, layer).to(dtype)


def add_bias(output: Tensor, layer: Any) -> Tensor:
    """Add the layer's bias, if it has one, to ``output``."""
    return output if layer.bias is None else output + layer.bias


def unfolded_int_mm(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    """Convolve INT8 codes by unfolding: ``int_mm`` with one row per window, ordered like the weight (KH, KW, C)."""
    windows = F.pad(codes, (0, 0, *4 * [conv.padding]), value=conv.zero_point)
    for axis, size in enumerate(conv.kernel_size, start=1):
        span = conv.dilation * (size - 1) + 1
        windows = windows.unfold(axis, span, conv.stride)[..., :: conv.dilation]
    rows = windows.movedim(3, -1)  # [B, H', W', KH, KW, C]
    return int_mm(rows.flatten(3).flatten(0, 2), conv, dtype).unflatten(0, rows.shape[:3])


def kernel_linear(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 codes [M, C] with the Triton kernel, as a 1 x 1 convolution: [M, N]."""
    rows, weight = codes[:, None, None], layer.codes[:, None, None]
    return torch.ops.sd_quant.product(rows, weight, layer.scale, layer.bias, (1, 0, 1), dtype)[:, 0, 0]


def kernel_convolution(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    """Convolve FP8 codes [B, H, W, C] with the Triton kernel."""
    weight, geometry = conv.codes.unflatten(1, (*conv.kernel_size, -1)), (conv.stride, conv.padding, conv.dilation)
    return torch.ops.sd_quant.product(codes, weight, conv.scale, conv.bias, geometry, dtype)


def aligned_scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """``scaled_mm``, or the Triton kernel for layers whose sizes CUDA does not take."""
    unaligned = any(size % FP8_MULTIPLE for size in layer.codes.shape)
    return (kernel_linear if unaligned else scaled_mm)(codes, layer, dtype)


@dataclass(frozen=True)
class Products:
    """The functions that multiply codes of one type (such as INT8) on one kind of device."""

    linear: Product
    convolution: Product | None  # None: convolutions are ``RoundedConv``


# By kind of device and ONNX type of the codes. No CPU multiplies FP8.
PRODUCTS = {
    "cpu": {"INT8": Products(int_mm, unfolded_int_mm), "FLOAT8E4M3FN": Products(dequantized_mm, None)},
    "cuda": {"INT8": Products(int_mm, None), "FLOAT8E4M3FN": Products(aligned_scaled_mm, kernel_convolution)},
}


def layer_of(module: nn.Module, layer: LayerAssignment, products: Mapping[str, Products]) -> nn.Module:
    """Build the native quantized layer that replaces ``module``, whose weight is smoothed and not yet rounded."""
    weight, fmt = module.get_parameter("weight").detach().float(), FORMATS[layer.format]
    if layer.activation_format is None:
        return WeightOnly(module, weight, layer)
    product = products[fmt.onnx_type]
    if isinstance(module, nn.Conv2d):
        square = all(len(set(sizes)) == 1 for sizes in (module.stride, module.dilation, module.padding))
        if product.convolution is None or module.groups > 1 or not square:
            return RoundedConv(module, weight, layer)
        return NativeConv(module, weight, layer, product.convolution)
    return (PerTokenLinear if layer.per_token else NativeLinear)(weight, module.bias, layer, product.linear)


@torch.no_grad()
def with_native_layers(
    unet: nn.Module,
    assignment: Mapping[str, LayerAssignment],
    device: torch.device = CPU,
    products: Mapping[str, Products] | None = None,
) -> nn.Module:
    """Smooth ``unet``, replace its quantized layers by the native layers of this module, in place, and return it.

    ``products`` are by default those of ``device``. ``unet`` should not come from ``modelopt.simulate``: ModelOpt's
    modules, even if disabled, keep a compiler from fusing.
    """
    if device.type == "cuda":
        import sd_quant.simulation.kernels  # noqa: F401  # registers its operators
    rewrite(unet, assignment)
    for layer in (layer for layer in assignment.values() if layer.format is not None):
        parent, _, name = layer.name.rpartition(".")
        native = layer_of(unet.get_submodule(layer.name), layer, products or PRODUCTS[device.type])
        setattr(unet.get_submodule(parent), name, native)
    return unet


def products_of_layers(network: nn.Module, assignment: Mapping[str, LayerAssignment]) -> dict[str, str]:
    """Return the type (a name of onnx.TensorProto) in which each quantized layer of ``network`` multiplies, by name.

    ``network`` has native layers. Attention's products are "FLOAT": they multiply dequantized numbers.
    """
    dequantized = {"FLOAT8E4M3FN", *(["INT8"] if int_mm_saturates() else [])} if best_device().type == "cpu" else set()
    types = {product: "FLOAT" for layer in assignment.values() for product in layer.attention_products}
    for name, layer in assignment.items():
        if layer.format is not None:
            kind = FORMATS[layer.format].onnx_type
            rounded = isinstance(network.get_submodule(name), RoundedConv | WeightOnly)
            types[name] = "FLOAT" if rounded or kind in dequantized else kind
    return types


def check_device(formats: Collection[str]) -> None:
    """Raise ResourceError if this machine has a GPU that cannot multiply inputs in ``formats``, or no Triton for it."""
    if not formats or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    for name in formats:
        needed = FORMATS[name].torch_compute_capability
        if capability < needed:
            raise ResourceError(
                f"torch multiplies {name} on GPUs of compute capability {'.'.join(map(str, needed))} or more "
                f"and this one has {'.'.join(map(str, capability))}; choose another preset or infer=openvino"
            )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            f"torch's INT8 and FP8 layers on a GPU need the package triton ({error}), which comes with torch for "
            "NVIDIA GPUs; install it: pip install triton"
        ) from error
