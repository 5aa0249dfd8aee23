"""Weights as initializers of a traced graph, and the DequantizeLinear nodes behind quantized ones.

Every initializer is lazy: its weight is read, smoothed and quantized when the file is written, so that one weight is in
memory at a time. The weight of a MatMul is stored transposed, ready to multiply. Codes in blocks are two-dimensional,
because TensorRT supports no others; those of a convolution get their shape after the DequantizeLinear.
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
    """The initializer for the graph input ``weight``, in its dtype; smoothed if it belongs to an assigned ``layer``."""
    name, dtype = weight.name, TORCH[weight.dtype]

    def read_weight() -> Tensor:
        return (read(name) if layer is None else rewritten(read(name), layer)).to(dtype)

    return initializer(graph, name, weight.dtype, weight.shape.numpy(), read_weight)


def quantized_weight(
    graph: ir.Graph,
    node: ir.Node,
    name: str,
    layer: LayerAssignment,
    read: ReadWeight,
    transposed: bool,
    dtype: ir.DataType = ir.DataType.FLOAT16,
) -> ir.Value:
    """The dequantized weight of ``node``, fp16 [out, in, ...], or [in, out] if ``transposed``.

    Its codes have one scale, one per output, of this ``dtype``; or one per block and for some formats a global scale.
    """
    fmt, shape = FORMATS[layer.format], layer.weight_shape
    if not fmt.onnx_type:
        return decoded_weight(graph, name, layer, read, transposed)
    if fmt.block is not None:
        shape = shape[0], math.prod(shape[1:])

    def codes_and_scales() -> tuple[Tensor, tuple[Tensor, ...]]:
        return layer.codes_and_scales(rewritten(read(name), layer).reshape(shape))

    def stored(tensor: Tensor) -> Tensor:
        return tensor.T if transposed and tensor.ndim > 1 else tensor

    def stored_shape(*sizes: int) -> tuple[int, ...]:
        return sizes[::-1] if transposed else sizes

    codes_type = ir.DataType[fmt.onnx_type]
    codes = initializer(
        graph,
        f"{name}.{layer.format}",
        codes_type,
        stored_shape(*shape),
        lambda: fmt.pack(stored(codes_and_scales()[0])),
    )
    if fmt.block is None:
        per_row = layer.weight_axis == 0
        scale = layer.weight_scale if per_row else layer.weight_scale[0]
        zeros = fmt.pack(torch.zeros(scale.shape, dtype=torch.int8))
        scales = [
            numbers(graph, f"{name}.scale", scale, dtype),
            initializer(graph, f"{name}.zero_point", codes_type, tuple(scale.shape), lambda: zeros),
        ]
        axis = {"axis": 1 if transposed else 0} if per_row else {}
        return insert(graph, node, "DequantizeLinear", [codes, *scales], f"{name}.dequantized", **axis)

    def block_scales(index: int, suffix: str, *sizes: int) -> ir.Value:
        dtype = fmt.scale_dtypes[index]
        kind = ir.DataType[fmt.onnx_scale_types[index]]
        return initializer(
            graph, f"{name}.{suffix}", kind, sizes, lambda: stored(codes_and_scales()[1][index].to(dtype))
        )

    block_scale = block_scales(0, "scale", *stored_shape(shape[0], shape[1] // fmt.block))
    if len(fmt.onnx_scale_types) > 1:
        both = [block_scale, block_scales(1, "global_scale")]
        half = {"output_dtype": ir.DataType.FLOAT16}
        block_scale = insert(graph, node, "DequantizeLinear", both, f"{name}.scale_dequantized", **half)
    blocks = {"axis": 0 if transposed else 1, "block_size": fmt.block}
    value = insert(graph, node, "DequantizeLinear", [codes, block_scale], f"{name}.dequantized", **blocks)
    if len(layer.weight_shape) > 2:
        whole = constant(graph, f"{name}.shape", np.array(layer.weight_shape, np.int64))
        value = insert(graph, node, "Reshape", [value, whole], f"{name}.shaped")
    return value


def decoded_weight(graph: ir.Graph, name: str, layer: LayerAssignment, read: ReadWeight, transposed: bool) -> ir.Value:
    """The initializer with the numbers of a format that no DequantizeLinear decodes, in fp16: no smaller in a graph."""
    shape = layer.weight_shape

    def decoded() -> Tensor:
        codes, scales = layer.codes_and_scales(rewritten(read(name), layer).flatten(1))
        weight = FORMATS[layer.format].dequantize(codes, *scales).view(shape)  # rotated as its input is in the graph
        return (weight.T if transposed else weight).half()

    return initializer(graph, f"{name}.dequantized", ir.DataType.FLOAT16, shape[::-1] if transposed else shape, decoded)
