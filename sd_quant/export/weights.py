"""Add weights to a traced graph: initializers, and DequantizeLinear nodes after quantized weights.

Initializers are lazy: each weight is read, smoothed and quantized when the file is written, one in memory at a time. A
MatMul's weight is stored transposed, ready to multiply. Block-quantized weights are stored in two dimensions, the only
form that TensorRT supports; a convolution's weight is reshaped after DequantizeLinear.
"""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.export.nodes import TORCH, constant, initializer, insert, numbers
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS

ReadWeight = Callable[[str], Tensor]  # a weight by its name in the graph


def high_precision_weight(
    graph: ir.Graph, weight: ir.Value, layer: LayerAssignment | None, read: ReadWeight
) -> ir.Value:
    """Add the initializer that replaces the graph input ``weight``, in its dtype; smoothed if ``layer`` requires it."""
    name, dtype = weight.name, TORCH[weight.dtype]

    def read_weight() -> Tensor:
        return (read(name) if layer is None else rewritten(read(name), layer)).to(dtype)

    return initializer(graph, name, weight.dtype, weight.shape.numpy(), read_weight)


def quantized_weight(
    node: ir.Node, name: str, layer: LayerAssignment, read: ReadWeight, transposed: bool, dtype: ir.DataType
) -> ir.Value:
    """Add the quantized weight of ``node``; return it dequantized, [out, in, ...], or [in, out] if ``transposed``.

    Scales per tensor or output channel have the type ``dtype``, scales per block the format's own; some formats add a
    global scale. Weights in a format that DequantizeLinear cannot decode are stored as fp16, which saves no space.
    """
    fmt, shape, graph = FORMATS[layer.format], layer.weight_shape, node.graph
    if fmt.block is not None:
        shape = shape[0], math.prod(shape[1:])

    def turned(tensor: Tensor) -> Tensor:
        return tensor.T if transposed and tensor.ndim > 1 else tensor

    def stored(suffix: str, kind: str, sizes: tuple[int, ...], take: Callable[..., Tensor]) -> ir.Value:
        """Add the initializer ``take(codes, scales)`` of shape ``sizes``, reversed if the weight is ``transposed``."""

        def read_weight() -> Tensor:
            return take(*layer.codes_and_scales(rewritten(read(name), layer).reshape(shape)))

        return initializer(
            graph, f"{name}.{suffix}", ir.DataType[kind], sizes[::-1] if transposed else sizes, read_weight
        )

    if not fmt.onnx_type:  # rotated as its input is in the graph

        def decoded(codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
            return turned(fmt.dequantize(codes, *scales).view(layer.weight_shape)).half()

        return stored("dequantized", "FLOAT16", layer.weight_shape, decoded)
    codes = stored(layer.format, fmt.onnx_type, shape, lambda codes, scales: fmt.pack(turned(codes)))
    if fmt.block is None:
        per_row = layer.weight_axis == 0
        scale = layer.weight_scale if per_row else layer.weight_scale[0]
        zeros = fmt.pack(torch.zeros(scale.shape, dtype=torch.int8))
        scales = [
            numbers(graph, f"{name}.scale", scale, dtype),
            initializer(graph, f"{name}.zero_point", codes.dtype, tuple(scale.shape), lambda: zeros),
        ]
        axis = {"axis": 1 if transposed else 0} if per_row else {}
        return insert(node, "DequantizeLinear", [codes, *scales], f"{name}.dequantized", **axis)

    def block_scales(index: int, suffix: str, *sizes: int) -> ir.Value:
        kind, dtype = fmt.onnx_scale_types[index], fmt.scale_dtypes[index]
        return stored(suffix, kind, sizes, lambda codes, scales: turned(scales[index].to(dtype)))

    block_scale = block_scales(0, "scale", shape[0], shape[1] // fmt.block)
    if len(fmt.onnx_scale_types) > 1:
        both = [block_scale, block_scales(1, "global_scale")]
        half = {"output_dtype": ir.DataType.FLOAT16}
        block_scale = insert(node, "DequantizeLinear", both, f"{name}.scale_dequantized", **half)
    blocks = {"axis": 0 if transposed else 1, "block_size": fmt.block}
    value = insert(node, "DequantizeLinear", [codes, block_scale], f"{name}.dequantized", **blocks)
    if len(layer.weight_shape) > 2:
        whole = constant(graph, f"{name}.shape", np.array(layer.weight_shape, np.int64))
        value = insert(node, "Reshape", [value, whole], f"{name}.shaped")
    return value
