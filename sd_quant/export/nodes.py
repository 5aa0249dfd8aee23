"""What is put into a traced graph: nodes, constants, and initializers that are read when the file is written."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.quantization.formats import Format


def initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Tensor]
) -> ir.Value:
    """Add an initializer whose bytes ``read`` returns when the file is written, 4-bit numbers packed in uint8."""

    def produce() -> ir.Tensor | ir.PackedTensor:
        tensor = read().contiguous()
        if dtype.bitwidth == 4:
            return ir.PackedTensor(tensor.numpy(), dtype, shape=shape, name=name)
        if tensor.dtype == torch.float8_e4m3fn:  # which numpy does not have
            tensor = tensor.view(torch.uint8)
        return ir.Tensor(tensor.numpy().view(dtype.numpy()), name=name)

    value = ir.Value(
        name=name,
        shape=ir.Shape(shape),
        type=ir.TensorType(dtype),
        const_value=ir.LazyTensor(produce, dtype=dtype, shape=ir.Shape(shape), name=name),
    )
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: np.ndarray | np.generic) -> ir.Value:
    """Add an initializer that holds ``array``."""
    array = np.asarray(array)
    dtype = ir.DataType.from_numpy(array.dtype)
    return initializer(graph, name, dtype, array.shape, lambda: torch.from_numpy(array))


def insert(graph: ir.Graph, before: ir.Node, op_type: str, inputs: list[ir.Value], name: str, **attributes) -> ir.Value:
    """Insert a node in front of ``before`` and return its one output, which has the node's ``name``."""
    node = ir.node(op_type, inputs, attributes=attributes, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]


def static_copy(graph: ir.Graph, node: ir.Node, value: ir.Value, name: str, fmt: Format, scale: float) -> ir.Value:
    """``value`` quantized and dequantized with a scale that is known before the network runs."""
    scales = static_scales(graph, name, fmt, scale)
    value = insert(graph, node, "QuantizeLinear", [value, *scales], f"{name}_quantized")
    return insert(graph, node, "DequantizeLinear", [value, *scales], f"{name}_dequantized")


def static_scales(graph: ir.Graph, name: str, fmt: Format, scale: float) -> tuple[ir.Value, ir.Value]:
    """The scale of an input and its zero point, which is zero, as QuantizeLinear and DequantizeLinear read them."""
    dtype = ir.DataType[fmt.onnx_type]
    scales = constant(graph, f"{name}_scale", np.array(scale, np.float16))
    return scales, initializer(graph, f"{name}_zero_point", dtype, (), lambda: torch.zeros((), dtype=torch.int8))
