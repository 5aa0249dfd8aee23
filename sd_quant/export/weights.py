"""Weights as initializers of a traced graph, and the DequantizeLinear nodes behind those that are quantized.

Every initializer is lazy: its weight is read, smoothed and quantized when the file is written and its bytes are due, so
that one weight is in memory at a time. The weight of a MatMul is stored transposed, ready to multiply. Codes in blocks
are two-dimensional, because TensorRT takes no others; a convolution's get their shape behind the DequantizeLinear.
"""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.export.nodes import constant, initializer, insert
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS

ReadWeight = Callable[[str], Tensor]  # a weight by the name that it has in the graph
SCALE_DTYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "FLOAT8E4M3FN": torch.float8_e4m3fn}


def high_precision_weight(
    graph: ir.Graph, weight: ir.Value, layer: LayerAssignment | None, read: ReadWeight
) -> ir.Value:
    """The initializer for the graph input ``weight``, in its dtype; smoothed if it belongs to an assigned ``layer``."""
    name, dtype = weight.name, torch.float16 if weight.dtype == ir.DataType.FLOAT16 else torch.float32

    def read_weight() -> Tensor:
        return (read(name) if layer is None else rewritten(read(name), layer)).to(dtype)

    return initializer(graph, name, weight.dtype, weight.shape.numpy(), read_weight)


def static_weight(
    graph: ir.Graph, node: ir.Node, name: str, layer: LayerAssignment, read: ReadWeight, transposed: bool
) -> ir.Value:
    """The dequantized weight of ``node``, from codes with one scale, or with one scale per output.

    Its shape is [out, in, ...], or [in, out] if ``transposed``.
    """
    fmt, per_row = FORMATS[layer.format], layer.weight_axis == 0
    dtype = ir.DataType[fmt.onnx_type]

    def codes() -> Tensor:
        packed = fmt.pack(layer.codes_and_scales(rewritten(read(name), layer))[0])
        return packed.T if transposed else packed

    shape = layer.weight_shape[::-1] if transposed else layer.weight_shape
    scale = layer.weight_scale if per_row else layer.weight_scale[0]
    zeros = torch.zeros(scale.shape, dtype=torch.int8)
    inputs = [
        initializer(graph, f"{name}.{layer.format}", dtype, shape, codes),
        constant(graph, f"{name}.scale", scale.half().numpy()),
        initializer(graph, f"{name}.zero_point", dtype, tuple(scale.shape), lambda: zeros),
    ]
    axis = {"axis": 1 if transposed else 0} if per_row else {}
    return insert(graph, node, "DequantizeLinear", inputs, f"{name}.dequantized", **axis)


def blocked_weight(
    graph: ir.Graph, node: ir.Node, name: str, layer: LayerAssignment, read: ReadWeight, transposed: bool
) -> ir.Value:
    """The dequantized weight of ``node``, from codes with a scale per block, and for some formats a global scale.

    Its shape is that of ``static_weight``; codes and scales are two-dimensional in front of a last Reshape.
    """
    fmt = FORMATS[layer.format]
    outputs, inputs = layer.weight_shape[0], math.prod(layer.weight_shape[1:])

    def stored_shape(rows: int, columns: int) -> tuple[int, int]:
        return (columns, rows) if transposed else (rows, columns)

    def codes_and_scales() -> tuple[Tensor, tuple[Tensor, ...]]:
        return layer.codes_and_scales(rewritten(read(name), layer).flatten(1))

    def codes() -> Tensor:
        unpacked, _ = codes_and_scales()
        return fmt.pack(unpacked.T if transposed else unpacked)

    def scale(index: int, suffix: str, shape: tuple[int, ...]) -> ir.Value:
        kind = fmt.onnx_scale_types[index]

        def read_scale() -> Tensor:
            scales = codes_and_scales()[1][index].to(SCALE_DTYPES[kind])
            return scales.T if transposed and scales.ndim > 1 else scales

        return initializer(graph, f"{name}.{suffix}", ir.DataType[kind], shape, read_scale)

    dtype, axis = ir.DataType[fmt.onnx_type], 0 if transposed else 1
    value = initializer(graph, f"{name}.{layer.format}", dtype, stored_shape(outputs, inputs), codes)
    scales = scale(0, "scale", stored_shape(outputs, inputs // fmt.block))
    if len(fmt.onnx_scale_types) > 1:
        global_scale = scale(1, "global_scale", ())
        half = {"output_dtype": ir.DataType.FLOAT16}
        scales = insert(graph, node, "DequantizeLinear", [scales, global_scale], f"{name}.scale_dequantized", **half)
    blocks = {"axis": axis, "block_size": fmt.block}
    value = insert(graph, node, "DequantizeLinear", [value, scales], f"{name}.dequantized", **blocks)
    if len(layer.weight_shape) > 2:
        shape = constant(graph, f"{name}.shape", np.array(layer.weight_shape, np.int64))
        value = insert(graph, node, "Reshape", [value, shape], f"{name}.shaped")
    return value
