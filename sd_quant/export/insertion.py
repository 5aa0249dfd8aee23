"""Nodes and initializers put into a traced graph."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

HALF = {"output_dtype": ir.DataType.FLOAT16}
SCALE_DTYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "FLOAT8E4M3FN": torch.float8_e4m3fn}


def initializer(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Tensor]):
    """A named initializer whose bytes are produced when the file is written; 4-bit ones are read packed, in uint8."""

    def produce() -> ir.Tensor | ir.PackedTensor:
        tensor = read().contiguous()
        if dtype.bitwidth == 4:
            return ir.PackedTensor(tensor.numpy(), dtype, shape=shape, name=name)
        if tensor.dtype == torch.float8_e4m3fn:  # which numpy cannot name
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
    array = np.asarray(array)
    dtype = ir.DataType.from_numpy(array.dtype)
    return initializer(graph, name, dtype, array.shape, lambda: torch.from_numpy(array))


def insert(graph: ir.Graph, before: ir.Node, op_type: str, inputs: list[ir.Value], name: str, **attributes) -> ir.Value:
    node = ir.node(op_type, inputs, attributes=attributes, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]
