"""Assignment and weights into a traced graph: what quantizes each assigned layer, its codes as initializers, one file.

    x ─ Mul(pre_quant_scale) ─┬─ QuantizeLinear ─ DequantizeLinear ─┐
                              │      codes ─ DequantizeLinear(scale) ┴─ Conv | MatMul | Gemm ─ (Add) ─ y
                              └─ MatMul(down) ─ MatMul(up) ───────────────────────────────────────┘

The layer is found by its weight's name, so nothing is decided here. A weight is read, smoothed and quantized only when
the file is written and its bytes are due. MatMul weights are stored transposed, ready to multiply. Codes in blocks are
two-dimensional, because TensorRT takes no others; a convolution's get their shape behind the DequantizeLinear.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.export.block_scales import dynamic_copy
from sd_quant.export.insertion import HALF, SCALE_DTYPES, constant, initializer, insert
from sd_quant.export.tracing import OPSET, raise_opset
from sd_quant.files import atomic_path, temporary_folder
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS, Format

ReadWeight = Callable[[str], Tensor]
# A single file is put together in memory, several times over; beyond this the weights go to a file beside the graph.
LARGEST_SINGLE_FILE = 2**28
Made = dict[tuple, ir.Value]  # what several layers read, once


def smoothed_input(graph: ir.Graph, node: ir.Node, layer: LayerAssignment, made: Made) -> ir.Value:
    """The layer's input, multiplied where nothing in front does it."""
    value = node.inputs[0]
    if not layer.multiplies:
        return value
    key = (value, id(layer.pre_quant_scale))
    if key not in made:
        scale = constant(graph, f"{layer.name}.pre_quant_scale", layer.pre_quant_scale.half().numpy())
        made[key] = insert(graph, node, "Mul", [value, scale], f"{layer.name}.smoothed")
    return made[key]


def quantized_input(
    graph: ir.Graph, node: ir.Node, value: ir.Value, layer: LayerAssignment, made: Made, rows: bool
) -> ir.Value:
    """Layers that read one tensor with the same scales read one quantized copy of it."""
    if layer.activation_format is None:
        return value
    static = layer.activation_scale
    key = (value, layer.activation_format, layer.activation_amax if static is None else static)
    if key not in made:
        name, form = f"{layer.name}.input", FORMATS[layer.activation_format]
        if static is None:
            made[key] = dynamic_copy(graph, node, value, name, layer, rows)
        else:
            made[key] = static_copy(graph, node, value, name, form, static)
    return made[key]


def static_copy(graph: ir.Graph, node: ir.Node, value: ir.Value, name: str, form: Format, scale: float) -> ir.Value:
    dtype = ir.DataType[form.onnx_type]
    scales = constant(graph, f"{name}_scale", np.array(scale, np.float16))
    zero_point = initializer(graph, f"{name}_zero_point", dtype, (), lambda: torch.zeros((), dtype=torch.int8))
    value = insert(graph, node, "QuantizeLinear", [value, scales, zero_point], f"{name}_quantized")
    return insert(graph, node, "DequantizeLinear", [value, scales, zero_point], f"{name}_dequantized")


def static_weight(
    graph: ir.Graph, node: ir.Node, name: str, layer: LayerAssignment, read: ReadWeight, transposed: bool
) -> ir.Value:
    """The dequantized weight [out, ...], or [in, out] for a MatMul, from codes with one scale or one per output."""
    form, per_row = FORMATS[layer.format], layer.weight_axis == 0
    dtype = ir.DataType[form.onnx_type]

    def codes() -> Tensor:
        weight = rewritten(read(name), layer)
        packed = form.pack(form.quantize(weight, *layer.weight_scales(weight)))
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
    """The same from codes with a scale per block, some with a global scale for those; two-dimensional until the end."""
    form = FORMATS[layer.format]
    outputs, numbers = layer.weight_shape[0], math.prod(layer.weight_shape[1:])

    def turned(rows: int, columns: int) -> tuple[int, int]:
        return (columns, rows) if transposed else (rows, columns)

    def weight_and_scales() -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = rewritten(read(name), layer).flatten(1)
        return weight, layer.weight_scales(weight)

    def codes() -> Tensor:
        weight, scales = weight_and_scales()
        found = form.quantize(weight, *scales)
        return form.pack(found.T if transposed else found)

    def scale(index: int, suffix: str, shape: tuple[int, ...]) -> ir.Value:
        kind = form.onnx_scale_types[index]

        def read_scale() -> Tensor:
            found = weight_and_scales()[1][index].to(SCALE_DTYPES[kind])
            return found.T if transposed and found.ndim > 1 else found

        return initializer(graph, f"{name}.{suffix}", ir.DataType[kind], shape, read_scale)

    dtype, axis = ir.DataType[form.onnx_type], 0 if transposed else 1
    value = initializer(graph, f"{name}.{layer.format}", dtype, turned(outputs, numbers), codes)
    scales = scale(0, "scale", turned(outputs, numbers // form.block))
    if len(form.onnx_scale_types) > 1:
        inputs = [scales, scale(1, "global_scale", ())]
        scales = insert(graph, node, "DequantizeLinear", inputs, f"{name}.scale_dequantized", **HALF)
    blocks = {"axis": axis, "block_size": form.block}
    value = insert(graph, node, "DequantizeLinear", [value, scales], f"{name}.dequantized", **blocks)
    if len(layer.weight_shape) > 2:
        shape = constant(graph, f"{name}.shape", np.array(layer.weight_shape, np.int64))
        value = insert(graph, node, "Reshape", [value, shape], f"{name}.shaped")
    return value


def add_low_rank(graph: ir.Graph, node: ir.Node, x: ir.Value, layer: LayerAssignment) -> None:
    """``y + (x @ down^T) @ up^T`` for everybody who read ``y``, the output of ``node``."""
    up, down = (
        constant(graph, f"{layer.name}.{name}", factor.T.half().contiguous().numpy())
        for name, factor in zip(("up", "down"), layer.low_rank, strict=True)
    )
    y = node.outputs[0]
    readers = [(usage.node, usage.idx) for usage in y.uses()]
    behind = readers[0][0]
    value = insert(graph, behind, "MatMul", [x, down], f"{layer.name}.low_rank_down")
    value = insert(graph, behind, "MatMul", [value, up], f"{layer.name}.low_rank_up")
    value = insert(graph, behind, "Add", [y, value], f"{layer.name}.with_low_rank")
    for reader, index in readers:
        reader.replace_input_with(index, value)


def split_gemm(graph: ir.Graph, gemm: ir.Node) -> ir.Node:
    """The MatMul and Add that a linear of rows becomes elsewhere; returns the Transpose of its weight."""
    x, weight, *bias = gemm.inputs
    transposed = insert(graph, gemm, "Transpose", [weight], f"{weight.name}.transposed", perm=[1, 0])
    value = insert(graph, gemm, "MatMul", [x, transposed], f"{weight.name}.product")
    if bias:
        value = insert(graph, gemm, "Add", [value, bias[0]], f"{weight.name}.with_bias")
    ir.convenience.replace_all_uses_with(gemm.outputs[0], value)
    graph.remove(gemm, safe=True)
    return transposed.producer()


def quantize_layer(graph: ir.Graph, weight: ir.Value, layer: LayerAssignment, read: ReadWeight, made: Made) -> None:
    """Rewrite the one node that multiplies with ``weight``, a graph input."""
    (node,) = [usage.node for usage in weight.uses()]
    rows = node.op_type == "Gemm"
    if rows:
        node = split_gemm(graph, node)
    transposed = node.op_type == "Transpose"
    if transposed:
        transpose = node
        (node,) = [usage.node for usage in transpose.outputs[0].uses()]
    x = smoothed_input(graph, node, layer, made)
    node.replace_input_with(0, quantized_input(graph, node, x, layer, made, rows))
    dequantized = static_weight if FORMATS[layer.format].block is None else blocked_weight
    node.replace_input_with(1, dequantized(graph, node, weight.name, layer, read, transposed))
    if layer.low_rank is not None:
        add_low_rank(graph, node, x, layer)
    if transposed:
        graph.remove(transpose, safe=True)


def quantize_attention(graph: ir.Graph, weight: ir.Value, layer: LayerAssignment) -> None:
    """Q/DQ in front of both matrix products of the attention whose output projection multiplies with ``weight``."""
    (node,) = [usage.node for usage in weight.uses()]
    if node.op_type == "Transpose":
        (node,) = [usage.node for usage in node.outputs[0].uses()]
    mixed = maker(node.inputs[0], "MatMul")
    scores = maker(maker(mixed.inputs[0], "Softmax").inputs[0], "MatMul")
    form = FORMATS[layer.activation_format]
    products = ((scores, 0, "query"), (scores, 1, "key"), (mixed, 1, "value"), (mixed, 0, "softmax"))
    for (node, index, what), amax in zip(products, (*layer.attention_amax, 1.0), strict=True):
        scale = form.scales(torch.empty(0), torch.tensor(amax))[0].item()
        near = static_copy(graph, node, node.inputs[index], f"{layer.name}.{what}", form, scale)
        node.replace_input_with(index, near)


def maker(value: ir.Value, op_type: str) -> ir.Node:
    """The nearest node of this type in front of ``value``, through nodes that only move numbers."""
    node = value.producer()
    while node is not None and node.op_type != op_type:
        node = node.inputs[0].producer() if node.op_type in ("Reshape", "Transpose", "Cast") else None
    if node is None:
        raise ArtifactError(f"the graph has no {op_type} in front of {value.name}, where an attention's should be")
    return node


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
    pending = {name for name, layer in assignment.items() if layer.format or layer.activation_format}
    formats = {name for layer in assignment.values() for name in (layer.format, layer.activation_format) if name}
    raise_opset(model, max([OPSET, *(FORMATS[name].opset for name in formats)]))
    made: Made = {}
    for value in weights:
        attention, _, projection = value.name.removeprefix(prefix).rpartition(".to_out.0.")
        if attention in pending and projection == "weight":
            quantize_attention(graph, value, assignment[attention])
            pending.discard(attention)
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

        ir.convenience.replace_all_uses_with(value, initializer(graph, value.name, value.dtype, shape, read_kept))
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
    with atomic_path(path) as graph, temporary_folder(path.parent) as folder:
        staged = Path(folder)
        try:
            ir.save(model, staged / path.name, external_data=data.name if external else None)
        except ir.serde.SerdeError as error:
            raise origin_of(error) from error
        if external:
            with atomic_path(data) as weights:
                (staged / data.name).replace(weights)
        (staged / path.name).replace(graph)
