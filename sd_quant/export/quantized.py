"""Assignment and weights into a traced graph: Q/DQ pairs around each assigned layer, INT8 initializers, one ONNX file.

    x ─ Mul(pre_quant_scale) ─ QuantizeLinear ─ DequantizeLinear ─┐
                      INT8 weight ─ DequantizeLinear(per channel) ┴─ Conv | MatMul | Gemm

The layer is found by its weight's name, so nothing is decided here. A weight is read, smoothed and quantized only when
the file is written and its bytes are due. MatMul weights are stored transposed, ready to multiply.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.int8 import quantize_weight

ReadWeight = Callable[[str], Tensor]
# A single file is put together in memory, several times over; beyond this the weights go to a file beside the graph.
LARGEST_SINGLE_FILE = 2**28


def initializer(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Tensor]):
    """A named initializer whose bytes are produced when the file is written."""

    def produce() -> ir.Tensor:
        return ir.Tensor(read().contiguous().numpy(), name=name)

    value = ir.Value(
        name=name,
        shape=ir.Shape(shape),
        type=ir.TensorType(dtype),
        const_value=ir.LazyTensor(produce, dtype=dtype, shape=ir.Shape(shape), name=name),
    )
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    dtype = ir.DataType.from_numpy(array.dtype)
    return initializer(graph, name, dtype, array.shape, lambda: torch.from_numpy(array))


def insert(graph: ir.Graph, before: ir.Node, op_type: str, inputs: list[ir.Value], name: str, **attributes) -> ir.Value:
    node = ir.node(op_type, inputs, attributes=attributes, name=name)
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]


def quantize_activation(graph: ir.Graph, node: ir.Node, layer: LayerAssignment, made: dict[tuple, ir.Value]) -> None:
    """Layers that read one tensor with the same scales read one quantized copy of it, kept in ``made``."""
    value = node.inputs[0]
    key = (value, layer.activation_scale, id(layer.pre_quant_scale) if layer.multiplies else None)
    if key not in made:
        made[key] = quantized_copy(graph, node, layer)
    node.replace_input_with(0, made[key])


def quantized_copy(graph: ir.Graph, node: ir.Node, layer: LayerAssignment) -> ir.Value:
    value, name = node.inputs[0], layer.name
    if layer.multiplies:
        scale = constant(graph, f"{name}.pre_quant_scale", layer.pre_quant_scale.half().numpy())
        value = insert(graph, node, "Mul", [value, scale], f"{name}.smoothed")
    scale = constant(graph, f"{name}.input_scale", np.array(layer.activation_scale, np.float16))
    zero_point = constant(graph, f"{name}.input_zero_point", np.array(0, np.int8))
    value = insert(graph, node, "QuantizeLinear", [value, scale, zero_point], f"{name}.input_quantized")
    return insert(graph, node, "DequantizeLinear", [value, scale, zero_point], f"{name}.input_dequantized")


def quantize_layer(
    graph: ir.Graph, weight: ir.Value, layer: LayerAssignment, read: ReadWeight, made: dict[tuple, ir.Value]
) -> None:
    """Rewrite the one node that multiplies with ``weight``, a graph input."""
    (node,) = [usage.node for usage in weight.uses()]
    transposed = node.op_type == "Transpose"
    if transposed:
        transpose = node
        (node,) = [usage.node for usage in transpose.outputs[0].uses()]
    name, axis = weight.name, 1 if transposed else 0
    shape = layer.weight_shape[::-1] if transposed else layer.weight_shape

    def read_int8() -> Tensor:
        quantized = quantize_weight(rewritten(read(name), layer), layer.weight_scale)
        return quantized.T if transposed else quantized

    quantize_activation(graph, node, layer, made)
    stored = initializer(graph, f"{name}.int8", ir.DataType.INT8, shape, read_int8)
    scale = constant(graph, f"{name}.scale", layer.weight_scale.half().numpy())
    zero_point = constant(graph, f"{name}.zero_point", np.zeros(len(layer.weight_scale), np.int8))
    value = insert(graph, node, "DequantizeLinear", [stored, scale, zero_point], f"{name}.dequantized", axis=axis)
    node.replace_input_with(1, value)
    if transposed:
        graph.remove(transpose, safe=True)


def write_onnx(
    model: ir.Model,
    path: Path,
    *,
    inputs: int,
    prefix: str,
    read: ReadWeight,
    assignment: Mapping[str, LayerAssignment],
) -> None:
    """Give the traced ``model`` its weights and write it. The model is used up.

    ``inputs`` of its inputs are the contract's, the rest are weights; ``prefix`` stands before a layer's name in
    theirs; ``read`` returns a weight by the name it has in the graph.
    Raises ArtifactError when the assignment names a layer that the graph does not have.
    """
    graph = model.graph
    weights = list(graph.inputs[inputs:])
    del graph.inputs[inputs:]
    pending = {name for name, layer in assignment.items() if layer.format}
    made: dict[tuple, ir.Value] = {}
    for value in weights:
        layer_name = value.name.removeprefix(prefix).rpartition(".")[0]
        shape = value.shape.numpy()
        if layer_name in pending and value.name.endswith(".weight"):
            quantize_layer(graph, value, assignment[layer_name], read, made)
            pending.discard(layer_name)
            continue
        dtype = torch.float16 if value.dtype == ir.DataType.FLOAT16 else torch.float32
        layer = assignment.get(layer_name)

        def read_kept(name=value.name, dtype=dtype, layer=layer) -> Tensor:
            return (read(name) if layer is None else rewritten(read(name), layer)).to(dtype)

        stored = initializer(graph, value.name, value.dtype, shape, read_kept)
        ir.convenience.replace_all_uses_with(value, stored)
    if pending:
        raise ArtifactError(f"the graph has no layer {sorted(pending)[0]}, which the assignment quantizes")
    graph.sort()  # a quantized copy was made where the first of its readers was found
    model.producer_name = "sd-quant"
    save(model, path)


def origin_of(error: BaseException) -> BaseException:
    """What went wrong while a weight was read, under the serializer's own wrappings."""
    return error if error.__cause__ is None else origin_of(error.__cause__)


def save(model: ir.Model, path: Path) -> None:
    """Written in a folder of its own, because a graph holds its data file's name; the graph takes its name last."""
    external = sum(value.const_value.nbytes for value in model.graph.initializers.values()) > LARGEST_SINGLE_FILE
    data = path.with_name(path.name + ".data")
    with atomic_path(path) as graph, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        staged = Path(folder)
        try:
            ir.save(model, staged / path.name, external_data=data.name if external else None)
        except ir.serde.SerdeError as error:
            raise origin_of(error) from error
        if external:
            with atomic_path(data) as weights:
                (staged / data.name).replace(weights)
        (staged / path.name).replace(graph)
