"""Edit a traced graph: insert nodes, constants and initializers, and quantize values.

Initializers are read when the file is written. A value is quantized with a static scale, or in blocks with scales that
the graph computes by standard ONNX operations: the maximum in fp32, the scale rounded once to the format's scale type:

    x ─┬─ Reshape ─ Abs ─ ReduceMax ─ scale of the format ─┬───────────┐
       └──────────────────────────────────── QuantizeLinear(block) ─ DequantizeLinear(block) ─ y

In an fp16 graph, scales of inputs and the operations from an input to its product are fp16, otherwise fp32, because
bf16 would round a scale by up to 0.4 %. Alternative not taken: TensorRT's ``TRT_FP4DynamicQuantize``, for one format,
which no other runtime has to verify it; TensorRT also builds plans from these standard operations.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, Format

BYTES = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.uint16}  # for types that numpy does not have
TORCH = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16, ir.DataType.FLOAT: torch.float32}


def onnx_type(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX type for weights of this torch dtype."""
    return next(known for known, each in TORCH.items() if each == dtype)


def type_of_scales(weights: ir.DataType) -> ir.DataType:
    """Return the type of a layer's scales, and of values computed with them, in a graph with weights of this type."""
    return ir.DataType.FLOAT16 if weights == ir.DataType.FLOAT16 else ir.DataType.FLOAT


def initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Tensor]
) -> ir.Value:
    """Add an initializer whose tensor ``read`` returns when the file is written; 4-bit numbers are packed in uint8."""

    def produce() -> ir.Tensor | ir.PackedTensor:
        tensor = read().contiguous()
        if dtype.bitwidth == 4:
            return ir.PackedTensor(tensor.numpy(), dtype, shape=shape, name=name)
        if tensor.dtype in BYTES:
            tensor = tensor.view(BYTES[tensor.dtype])
        return ir.Tensor(tensor.numpy().view(dtype.numpy()), name=name)

    kind = {"dtype": dtype, "shape": ir.Shape(shape), "name": name}
    value = ir.Value(
        name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=ir.LazyTensor(produce, **kind)
    )
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: np.ndarray | np.generic) -> ir.Value:
    """Add an initializer that holds ``array``."""
    array = np.asarray(array)
    dtype = ir.DataType.from_numpy(array.dtype)
    return initializer(graph, name, dtype, array.shape, lambda: torch.from_numpy(array))


def numbers(graph: ir.Graph, name: str, values: Tensor | float, dtype: ir.DataType) -> ir.Value:
    """Add an initializer with ``values`` rounded to ``dtype``, fp16, bf16 or fp32."""
    rounded = torch.as_tensor(values).to(TORCH[dtype])
    return initializer(graph, name, dtype, tuple(rounded.shape), lambda: rounded)


def insert(before: ir.Node, op_type: str, inputs: list[ir.Value], name: str, **attributes) -> ir.Value:
    """Insert an ``op_type`` node before the node ``before``; return its only output. Both have the name ``name``."""
    node = ir.node(op_type, inputs, attributes=attributes, name=name)
    node.outputs[0].name = name
    before.graph.insert_before(before, node)
    return node.outputs[0]


def only_reader(value: ir.Value) -> ir.Node:
    """Return the only node that consumes ``value``."""
    (usage,) = value.uses()
    return usage.node


def read_instead(value: ir.Value, made: Callable[[ir.Node, ir.Value], ir.Value]) -> None:
    """Let all nodes that consume ``value`` read ``made(first, value)`` instead, inserted before the first of them."""
    readers = [(usage.node, usage.idx) for usage in value.uses()]
    replacement = made(readers[0][0], value)
    for reader, index in readers:
        reader.replace_input_with(index, replacement)


def static_copy(node: ir.Node, value: ir.Value, name: str, fmt: Format, scale: float, dtype: ir.DataType) -> ir.Value:
    """Quantize and dequantize ``value``, of type ``dtype``, before ``node``; return the result. The scale is static."""
    scales = static_scales(node.graph, name, fmt, scale, dtype)
    value = insert(node, "QuantizeLinear", [value, *scales], f"{name}_quantized")
    return insert(node, "DequantizeLinear", [value, *scales], f"{name}_dequantized")


def static_scales(
    graph: ir.Graph, name: str, fmt: Format, scale: float, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """Add an input's scale, of type ``dtype``, and zero point 0, for QuantizeLinear and DequantizeLinear."""
    zero = fmt.pack(torch.zeros((), dtype=torch.int8))
    return (
        numbers(graph, f"{name}_scale", scale, dtype),
        initializer(graph, f"{name}_zero_point", ir.DataType[fmt.onnx_type], (), lambda: zero),
    )


def dynamic_copy(
    before: ir.Node, value: ir.Value, name: str, layer: LayerAssignment, rows: bool, dtype: ir.DataType
) -> ir.Value:
    """Quantize and dequantize a layer's input ``value`` in blocks along its last axis; the graph computes the scales.

    ``value``, of type ``dtype``, is [batch, tokens, in] or, if ``rows``, has any axes before ``in``.
    """
    fmt, graph, inserted = FORMATS[layer.activation_format], before.graph, 0
    global_scale = layer.activation_scales(torch.zeros(fmt.block))[-1].max().item()  # formats without one ignore it

    def apply(op_type: str, *inputs: ir.Value | float, **attributes) -> ir.Value:
        nonlocal inserted
        inserted += 1
        values = [
            value if isinstance(value, ir.Value) else constant(graph, f"{name}.{inserted}.{index}", np.float32(value))
            for index, value in enumerate(inputs)
        ]
        types = {key: ir.DataType[value] if isinstance(value, str) else value for key, value in attributes.items()}
        return insert(before, op_type, values, f"{name}.{op_type}.{inserted}", **types)

    inner = [layer.weight_shape[1] // fmt.block, fmt.block]
    blocks = constant(graph, f"{name}.blocks", np.array(inner if rows else [0, 0, *inner], np.int64))
    if rows:
        leading = insert(before, "Shape", [value], f"{name}.leading", start=0, end=-1)
        blocks = insert(before, "Concat", [leading, blocks], f"{name}.shape", axis=0)
    last = constant(graph, f"{name}.last", np.array([-1], np.int64))
    amax = apply("ReduceMax", apply("Abs", apply("Reshape", value, blocks)), last, keepdims=0)
    scale = fmt.onnx_scale(apply, apply("Cast", amax, to="FLOAT"), global_scale)
    if dtype != ir.DataType.FLOAT16:  # to which every format rounds its scale
        scale = apply("Cast", scale, to=dtype.name)
    blocked = {"axis": -1, "block_size": fmt.block}
    codes = apply("QuantizeLinear", value, scale, output_dtype=fmt.onnx_type, **blocked)
    return insert(before, "DequantizeLinear", [codes, scale], f"{name}_dequantized", **blocked)
