"""Quantized layers that torch itself computes from codes, without an exported file.

They show what a format costs and gains with torch alone, and what ``torch.compile`` makes of it. A layer holds codes
and scales, and a function that multiplies codes: torch's own (``torch._int_mm``, ``torch._scaled_mm``) or, on a GPU,
where torch has none or leaves int32 sums behind, ours (``product_kernel``). ``PRODUCTS`` has one row for each device
and format. A convolution is a matrix product of unfolded codes; where that is slower than convolving dequantized
numbers in the model's own precision, the layer does the latter and gains nothing. The road not taken is torchao, whose
quantizers choose scales of their own.
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
from sd_quant.quantization.rotation import rotation_matrix
from sd_quant.simulation.rewrite import rewrite

SCALE_TYPES = {"FLOAT16": torch.float16, "FLOAT8E4M3FN": torch.float8_e4m3fn, "FLOAT": torch.float32}
MIN_ROWS = 17  # that CUDA's INT8 product takes
ALIGNMENT = 16  # CUDA's FP8 product takes sizes that are multiples of it


class NativeLayer(nn.Module):
    """The codes of a weight, its scales, and the ``product`` that multiplies them with codes of the input."""

    codes: Tensor  # [N, K]; K of a convolution runs over height, width and channels
    weight_scale: Tensor  # fp32, [N] or [1]
    max_weight_scale: Tensor  # fp32, a scalar
    input_scale: Tensor  # fp32, a scalar
    scale: Tensor  # fp32 [N], of a product of two codes
    pre_quant_scale: Tensor | None  # [C] by which the input is multiplied, if nothing in front of the layer does it
    matrix: Tensor | None  # fp32, which rotates groups of a linear's inputs, if they are rotated

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment, product: "Product"):
        """``weight`` fp32 [N, C, ...] is smoothed and not yet rounded."""
        super().__init__()
        codes, (weight_scale,) = layer.codes_and_scales(weight)
        self.format, self.bias, self.product = layer.format, bias, product
        self.shift = layer.shift  # a float, so that no call waits for a GPU
        self.saturates = saturates()  # a constant to torch.compile
        self.zero_point = layer.activation_zero_point
        self.register_buffer("codes", codes.movedim(1, -1).flatten(1))
        self.register_buffer("weight_scale", weight_scale.float().flatten())
        self.register_buffer("max_weight_scale", self.weight_scale.max())
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))
        self.register_buffer("scale", (self.input_scale * self.weight_scale).expand(len(weight)).contiguous())
        multiplies = layer.pre_quant_scale.half().to(weight) if layer.multiplies else None
        self.register_buffer("pre_quant_scale", multiplies)
        self.register_buffer("matrix", rotation_matrix(layer.rotation).to(weight) if layer.rotation else None)

    def smoothed(self, x: Tensor) -> Tensor:
        """An input [..., C] smoothed and rotated, in fp32: bf16 has too few bits for numbers on their way to codes."""
        smoothed = x if self.pre_quant_scale is None else x.float() * self.pre_quant_scale
        if self.matrix is None:
            return smoothed
        return (smoothed.float().unflatten(-1, (-1, len(self.matrix))) @ self.matrix).flatten(-2)

    def quantized(self, smoothed: Tensor) -> Tensor:
        """The codes of a smoothed input [..., C]."""
        shifted = smoothed.float() - self.shift if self.shift else smoothed
        return FORMATS[self.format].quantize(shifted, self.input_scale)


class NativeLinear(NativeLayer):
    """A linear; its ``product`` takes codes [M, C] and returns [M, N]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(self.smoothed(x), x.dtype)

    def multiplied(self, smoothed: Tensor, dtype: torch.dtype) -> Tensor:
        """The output for a smoothed input."""
        return self.product(self.quantized(smoothed).flatten(0, -2), self, dtype).unflatten(0, smoothed.shape[:-1])


class PerTokenLinear(nn.Module):
    """A linear of tokens over their largest numbers, which its output is multiplied by before it gets its bias."""

    def __init__(self, weight: Tensor, bias, layer: LayerAssignment, product: "Product"):
        super().__init__()
        self.linear, self.bias = NativeLinear(weight, None, layer, product), bias

    def forward(self, x: Tensor) -> Tensor:
        smoothed = self.linear.smoothed(x).float()
        largest = token_amax(smoothed)
        output = self.linear.multiplied(smoothed / largest, torch.float32) * largest
        return (output if self.bias is None else output + self.bias).to(x.dtype)


class NativeConv(NativeLayer):
    """A convolution; its ``product`` takes codes [B, H, W, C] and returns [B, H', W', N]."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, layer: LayerAssignment, product: "Product"):
        super().__init__(weight, conv.bias, layer, product)
        if layer.bias is not None:
            del self.bias
            self.register_buffer("bias", layer.bias.to(weight))  # in fp32, because it is much larger than the output
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride[0], conv.dilation[0]
        self.padding = int(conv.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        codes = self.quantized(x.movedim(1, -1)).contiguous()  # a convolution's input is not smoothed
        return self.product(codes, self, x.dtype).movedim(-1, 1)


class RoundedConv(nn.Module):
    """A convolution of fake-quantized numbers in the model's own precision."""

    input_scale: Tensor  # fp32, a scalar

    def __init__(self, conv, weight: Tensor, layer: LayerAssignment):
        """``weight`` fp32 [N, C, KH, KW] is smoothed and not yet rounded."""
        super().__init__()
        fmt = FORMATS[layer.format]
        scales = layer.weight_scales(weight)
        self.format, self.bias, self.shift = layer.activation_format, conv.bias, layer.shift
        rounded = fmt.dequantize(fmt.quantize(weight, *scales), *scales).to(conv.weight)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        self.register_buffer("input_scale", torch.tensor(layer.activation_scale, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        fmt = FORMATS[self.format]
        codes = fmt.quantize(x.float() - self.shift if self.shift else x, self.input_scale)
        fake_quantized = (fmt.dequantize(codes, self.input_scale) + self.shift).to(x)
        return F.conv2d(fake_quantized, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class WeightOnly(nn.Module):
    """A linear or convolution of high-precision inputs, whose weight is codes in memory: every call dequantizes it.

    A linear may have a ``product`` that does so while it multiplies. Without one codes are unpacked and scaled first,
    compiled in one kernel, on a GPU by Triton.
    """

    codes: Tensor  # one row, 4-bit codes two to a byte
    pre_quant_scale: Tensor | None  # as of a ``NativeLayer``

    def __init__(
        self,
        module: nn.Linear | nn.Conv2d,
        weight: Tensor,
        layer: LayerAssignment,
        product: "WeightProduct | None" = None,
    ):
        """``weight`` fp32 [N, C, ...] is smoothed and not yet rounded."""
        super().__init__()
        rows = weight.flatten(1)
        codes, scales = layer.codes_and_scales(rows)
        self.format, self.bias, self.shape, self.rows = layer.format, module.bias, weight.shape, rows.shape
        self.register_buffer("codes", FORMATS[layer.format].pack(codes))
        for scale, kind in zip(scales, FORMATS[layer.format].onnx_scale_types, strict=True):
            self.register_buffer(f"{kind.lower()}_scale", scale.to(SCALE_TYPES[kind]))  # exactly, as they are stored
        multiplies = layer.pre_quant_scale.half().to(weight) if layer.multiplies else None
        self.register_buffer("pre_quant_scale", multiplies)
        self.geometry, self.product = None, product
        if isinstance(module, nn.Conv2d):
            self.geometry = (module.stride, module.padding, module.dilation, module.groups)

    def dequantized(self) -> Tensor:
        """The numbers of the codes, fp32 in the shape of the weight."""
        fmt = FORMATS[self.format]
        scales = (getattr(self, f"{kind.lower()}_scale").float() for kind in fmt.onnx_scale_types)
        codes = fmt.unpack(self.codes.flatten())[: self.rows.numel()]
        return fmt.dequantize(codes.view(self.rows), *scales).view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        smoothed = x if self.pre_quant_scale is None else (x.float() * self.pre_quant_scale).to(x)
        if self.geometry is None and self.product is not None:
            return self.product(smoothed.flatten(0, -2), self).unflatten(0, smoothed.shape[:-1])
        weight = self.dequantized().to(x)
        if self.geometry is None:
            return F.linear(smoothed, weight, self.bias)
        return F.conv2d(smoothed, weight, self.bias, *self.geometry)  # type: ignore[arg-type]


# Multiplies codes of an input with a layer's; the result has scales, bias and the dtype of the third argument.
Product = Callable[[Tensor, Any, torch.dtype], Tensor]
WeightProduct = Callable[[Tensor, WeightOnly], Tensor]  # an input [M, C] by a layer's weight [N, C], plus bias


def int_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """The product of INT8 codes by torch: exact sums, in fp64 where int32 saturates; scale and bias in fp32."""
    if layer.saturates and codes.device.type == "cpu":
        product = (codes.double() @ layer.codes.T.double()).float()
    else:
        missing = max(0, MIN_ROWS - len(codes))
        product = torch._int_mm(F.pad(codes, (0, 0, 0, missing)), layer.codes.T)[: len(codes)]
    return with_bias(product * layer.scale, layer).to(dtype)


@cache
def saturates() -> bool:
    """Whether torch's product of INT8 codes overflows on this processor, which a product of the largest codes shows.

    Without VNNI oneDNN adds two products in 16 bits, and the sum saturates.
    """
    largest = torch.full((MIN_ROWS, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.T) != 64 * 127**2).any())


def scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """The product of FP8 codes by torch, summed in fp32 or by the GPU's fast accumulation, then rounded to ``dtype``.

    Where the weight has a scale per row, torch multiplies with the largest and the ratios are applied afterwards,
    because torch takes scales per row on few GPUs and in bfloat16 only.
    """
    per_row = layer.weight_scale.numel() > 1
    fused_bias = layer.bias if dtype != torch.float32 and not per_row else None  # CUDA adds none to fp32
    output = torch._scaled_mm(
        codes,
        layer.codes.T,
        layer.input_scale,
        layer.max_weight_scale,
        bias=fused_bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    if per_row:
        output = output * (layer.weight_scale / layer.max_weight_scale).to(dtype)
    return output if fused_bias is not None else with_bias(output, layer)


def dequantized_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """The product of the numbers that codes stand for, in fp32: what a recipe means, at no gain.

    So torch's own FP8 product is computed on a processor, but where it has AMX: there oneDNN's reference takes a
    thousand times as long.
    """
    return with_bias((codes.float() @ layer.codes.float().T) * layer.scale, layer).to(dtype)


def with_bias(output: Tensor, layer: NativeLayer) -> Tensor:
    """``output`` plus the layer's bias, if it has one."""
    return output if layer.bias is None else output + layer.bias


def unfolded_int_mm(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    """A convolution of INT8 codes as ``int_mm`` of one row per window, in the order of the weight (KH, KW, C)."""
    windows = F.pad(codes, (0, 0, *4 * [conv.padding]), value=conv.zero_point)
    for axis, size in enumerate(conv.kernel_size, start=1):
        span = conv.dilation * (size - 1) + 1
        windows = windows.unfold(axis, span, conv.stride)[..., :: conv.dilation]
    rows = windows.movedim(3, -1)  # [B, H', W', KH, KW, C]
    return int_mm(rows.flatten(3).flatten(0, 2), conv, dtype).unflatten(0, rows.shape[:3])


def kernel_linear(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """The product of codes by our kernel, as a convolution of one by one."""
    rows, weight = codes[:, None, None], layer.codes[:, None, None]
    return torch.ops.sd_quant.product(rows, weight, layer.scale, layer.bias, 1, 0, 1, 0, dtype)[:, 0, 0]


def kernel_convolution(codes: Tensor, conv: NativeConv, dtype: torch.dtype) -> Tensor:
    """A convolution of codes by our kernel."""
    weight, geometry = conv.codes.unflatten(1, (*conv.kernel_size, -1)), (conv.stride, conv.padding, conv.dilation)
    return torch.ops.sd_quant.product(codes, weight, conv.scale, conv.bias, *geometry, conv.zero_point, dtype)


def aligned_scaled_mm(codes: Tensor, layer: NativeLayer, dtype: torch.dtype) -> Tensor:
    """``scaled_mm`` where CUDA takes the layer's sizes, and our kernel elsewhere."""
    unaligned = any(size % ALIGNMENT for size in layer.codes.shape)
    return kernel_linear(codes, layer, dtype) if unaligned else scaled_mm(codes, layer, dtype)


def kernel_weight(x: Tensor, layer: WeightOnly) -> Tensor:
    """The product of an input with a linear's weight in E2M1 codes by our kernel."""
    scale = layer.get_buffer("float16_scale")
    return torch.ops.sd_quant.weight_product(x, layer.codes.view(len(scale), -1), scale, layer.bias)


@dataclass(frozen=True)
class Products:
    """What multiplies the codes of one format on one kind of device."""

    linear: Product
    convolution: Product | None  # None: convolutions are ``RoundedConv``


# By device and by the ONNX type of the codes. No CPU multiplies FP8.
PRODUCTS = {
    "cpu": {"INT8": Products(int_mm, unfolded_int_mm), "FLOAT8E4M3FN": Products(dequantized_mm, None)},
    "cuda": {
        "INT8": Products(kernel_linear, kernel_convolution),
        "FLOAT8E4M3FN": Products(aligned_scaled_mm, kernel_convolution),
    },
}
# By device and by the ONNX types of codes and scales: what multiplies weights whose inputs are in high precision.
WEIGHT_PRODUCTS: dict[str, dict[tuple[str, ...], WeightProduct]] = {
    "cuda": {("FLOAT4E2M1", "FLOAT16"): kernel_weight},
}


def layer_of(
    module: nn.Module,
    layer: LayerAssignment,
    products: Mapping[str, Products],
    weight_products: Mapping[tuple[str, ...], WeightProduct] | None = None,
) -> nn.Module:
    """The layer of codes that replaces ``module``, whose weight is smoothed and not yet rounded.

    Without ``weight_products`` a weight whose inputs are in high precision is dequantized by every call.
    """
    weight, fmt = module.get_parameter("weight").detach().float(), FORMATS[layer.format]
    if layer.activation_format is None:
        multiplies = (weight_products or {}).get((fmt.onnx_type, *fmt.onnx_scale_types))
        return WeightOnly(module, weight, layer, multiplies)  # type: ignore[arg-type]
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
    """Smooth ``unet`` and replace its quantized layers by layers of codes, in place, and return it.

    The layers multiply as ``PRODUCTS`` says for ``device``, or with the ``products`` that are given instead. This does
    not start from what ``simulate`` returns, because ModelOpt's modules, even idle ones, keep a compiler from fusing.
    """
    if device.type == "cuda":
        import sd_quant.simulation.product_kernel  # registers the kernels as operators
        import sd_quant.simulation.weight_kernel  # noqa: F401
    rewrite(unet, assignment)
    for layer in assignment.values():
        if layer.format is None:
            continue
        parent, _, name = layer.name.rpartition(".")
        chosen = products or PRODUCTS[device.type], WEIGHT_PRODUCTS.get(device.type, {})
        native = layer_of(unet.get_submodule(layer.name), layer, *chosen)
        setattr(unet.get_submodule(parent), name, native)
    return unet


def products_of_layers(network: nn.Module, assignment: Mapping[str, LayerAssignment]) -> dict[str, str]:
    """What each quantized layer of a ``network`` with native layers multiplies, a name of onnx.TensorProto.

    Attention's products are those of the simulation, of dequantized numbers.
    """
    dequantized = set()
    if best_device().type == "cpu":
        dequantized = {"FLOAT8E4M3FN", "INT8"} if saturates() else {"FLOAT8E4M3FN"}
    attention = {product: "FLOAT" for layer in assignment.values() for product in layer.attention_products}
    types = {name: FORMATS[layer.format].onnx_type for name, layer in assignment.items() if layer.format is not None}
    rounded = {name for name in types if isinstance(network.get_submodule(name), RoundedConv | WeightOnly)}
    return attention | {
        name: "FLOAT" if name in rounded or kind in dequantized else kind for name, kind in types.items()
    }


def check_device(formats: Collection[str]) -> None:
    """Raises ResourceError where torch cannot multiply codes of these formats on this machine's GPU. A CPU can."""
    if not formats or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    for name in formats:  # of inputs: a weight alone is dequantized
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
