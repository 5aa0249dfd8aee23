"""Put an assignment into a traced graph: QuantizeLinear and DequantizeLinear around each layer that it quantizes.

    x ─ Mul(pre_quant_scale) ─┬─ QuantizeLinear ─ DequantizeLinear ─┐
                              │      codes ─ DequantizeLinear(scale) ┴─ Conv | MatMul | Gemm ─ (Add) ─ y
                              └─ MatMul(down) ─ MatMul(up) ───────────────────────────────────────┘

Rotated inputs (``quantization.rotation``) pass a Reshape, a MatMul with the matrix and a Reshape before QuantizeLinear.
Inputs that are scaled per token are divided by each token's largest magnitude, so that one static scale serves them all
and every runtime has integer kernels for the product. QuantizeLinear with a scale per token would avoid the division,
but OpenVINO supports no scales that the graph computes.

    x ─┬─────────────── Div ─ QuantizeLinear ─ DequantizeLinear ─ MatMul ─ Mul ─ (Add) ─ y
       └ Abs ─ ReduceMax ┴─────────────────────────────────────────────────┘

No runtime multiplies codes of four bits, and TensorRT for RTX fails on such a product; so for them the magnitude
multiplies what DequantizeLinear returns.

The input of a convolution may be shifted (``quantization.convolutions``). It is padded after QuantizeLinear, with the
code of zero, so that the response to the shift is the same everywhere: a bias. Other standard operations cost more
(docs/results_speed.md): a Pad before QuantizeLinear is one of fp16, and adding a map after the convolution depends on
the image's size; TensorRT does not support a zero point in QuantizeLinear.

    x ─ Sub(shift) ─ QuantizeLinear ─ Pad ─ DequantizeLinear ─ Conv without padding, with another bias

A graph of bf16 has fp32 from the Cast in front of a layer to its product, so that eight bits round neither scales, nor
factors, nor the bias of a shifted convolution, thirty times as large as the output; runtimes fuse the Casts. Where only
the weight is quantized, it is rounded to bf16 behind its DequantizeLinear and the product is one of bf16.

    x ─ Cast(fp32) ─ Mul ─ QuantizeLinear ─ DequantizeLinear ─ MatMul ─ Cast(bf16) ─ (Add) ─ y

A layer is the node that multiplies with its weight, so nothing is decided here. The road not taken is to trace a
network with quantizers in it, which would need a trace for every recipe.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from sd_quant.errors import ArtifactError
from sd_quant.export.attention import attention_before, quantize_attention
from sd_quant.export.nodes import (
    constant,
    dynamic_copy,
    insert,
    numbers,
    only_reader,
    read_instead,
    static_copy,
    static_scales,
    type_of_scales,
)
from sd_quant.export.onnx_file import save
from sd_quant.export.tracing import OPSET, raise_opset
from sd_quant.export.weights import ReadWeight, high_precision_weight, quantized_weight
from sd_quant.quantization.assignment import SMALLEST_TOKEN, LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotation_matrix

SharedValues = dict[tuple, ir.Value]  # smoothed and quantized inputs that several layers read


def write_onnx(
    model: ir.Model,
    path: Path,
    *,
    inputs: int,
    prefix: str,
    read: ReadWeight,
    assignment: Mapping[str, LayerAssignment],
) -> None:
    """Give the traced ``model`` its weights, quantized by the ``assignment``, and write it. Changes ``model``.

    The first ``inputs`` of the graph's inputs are the contract's, the others are weights. ``prefix`` precedes the
    assignment's layer names in the names of the weights; ``read`` returns a weight by its name in the graph.
    Raises ArtifactError when the assignment names a layer that the graph does not have.
    """
    graph = model.graph
    weights = list(graph.inputs[inputs:])
    del graph.inputs[inputs:]
    pending = {name for name, layer in assignment.items() if layer.format or layer.activation_format}
    formats = {name for layer in assignment.values() for name in (layer.format, layer.activation_format) if name}
    raise_opset(model, max([OPSET, *(FORMATS[name].opset for name in formats)]))
    shared: SharedValues = {}
    for weight in weights:
        linear, _, kind = weight.name.removeprefix(prefix).rpartition(".")
        if (attention := attention_before(linear)) in pending and kind == "weight":
            quantize_attention(graph, weight, assignment[attention])
            pending.discard(attention)
    high_precision = []
    for weight in weights:
        layer_name = weight.name.removeprefix(prefix).rpartition(".")[0]
        if layer_name in pending and weight.name.endswith(".weight"):
            quantize_layer(graph, weight, assignment[layer_name], read, shared)
            pending.discard(layer_name)
        else:
            high_precision.append((weight, assignment.get(layer_name)))
    for weight, layer in high_precision:
        if weight.uses():  # the bias of a shifted convolution has been replaced
            ir.convenience.replace_all_uses_with(weight, high_precision_weight(graph, weight, layer, read))
    if pending:
        raise ArtifactError(f"the graph has no layer {sorted(pending)[0]}, which the assignment quantizes")
    graph.sort()  # a shared input was inserted in front of the first reader that was visited, not of the first to run
    model.producer_name = "sd-quant"
    save(model, path)


def quantize_layer(
    graph: ir.Graph, weight: ir.Value, layer: LayerAssignment, read: ReadWeight, shared: SharedValues
) -> None:
    """Quantize weight and input of the one node that multiplies with ``weight``, a graph input."""
    node = only_reader(weight)
    rows = node.op_type == "Gemm"
    if rows:
        end_in_identity(graph, node)
        node = split_gemm(graph, node)
    transposed = node.op_type == "Transpose"
    if transposed:
        transpose = node
        node = only_reader(transpose.outputs[0])
    end_in_identity(graph, node)
    dtype, scales = weight.dtype, type_of_scales(weight.dtype)
    wide = dtype != scales and (layer.activation_format or layer.multiplies or layer.rotation)
    x = cast(graph, node, node.inputs[0], scales, f"{layer.name}.in_fp32", shared) if wide else node.inputs[0]
    x = smoothed_input(graph, node, x, layer, scales, shared)
    if layer.low_rank is not None:  # first, so that a product that is scaled per token is scaled before the sum
        narrow = cast(graph, node, x, dtype, f"{layer.name}.input_rounded", shared) if wide else x
        add_low_rank(graph, node, narrow, layer, dtype)
    product = scales if layer.activation_format else dtype
    if product != dtype:
        name = f"{layer.name}.rounded"
        read_instead(node.outputs[0], lambda before, y: insert(graph, before, "Cast", [y], name, to=dtype))
        if node.op_type == "Conv" and len(node.inputs) > 2:
            node.inputs[2].dtype = product
    if layer.activation_zero_point:
        quantize_shifted(graph, node, x, layer, scales)
    else:
        value = rotated_input(graph, node, x, layer, scales, shared)
        if layer.per_token:
            value = quantized_per_token(graph, node, value, layer, scales, shared, rows)
        elif layer.activation_format:
            value = quantized_input(graph, node, value, layer, scales, shared, rows)
        elif wide:
            value = cast(graph, node, value, dtype, f"{layer.name}.input_rounded", shared)
        node.replace_input_with(0, value)
    fmt = FORMATS[layer.format]  # scales of blocks are of the format's own type, and make fp16
    made = ir.DataType.FLOAT16 if fmt.block or not fmt.onnx_type or product == ir.DataType.BFLOAT16 else product
    value = quantized_weight(graph, node, weight.name, layer, read, transposed, made)
    if product != made:
        value = insert(graph, node, "Cast", [value], f"{weight.name}.cast", to=product)
    node.replace_input_with(1, value)
    if transposed:
        graph.remove(transpose, safe=True)


def end_in_identity(graph: ir.Graph, node: ir.Node) -> None:
    """Put an Identity behind a ``node`` that makes an output of the graph, so that other nodes can come between."""
    product = node.outputs[0]
    if not product.is_graph_output():
        return
    last = ir.node("Identity", [product])
    output = last.outputs[0]
    output.name, product.name = product.name, f"{product.name}.product"
    output.type, output.shape = product.type, product.shape
    graph.outputs[list(graph.outputs).index(product)] = output
    graph.append(last)


def split_gemm(graph: ir.Graph, gemm: ir.Node) -> ir.Node:
    """Replace a Gemm, a linear of two-dimensional inputs, by the Transpose, MatMul and Add of other linears.

    Returns the Transpose of its weight.
    """
    x, weight, *bias = gemm.inputs
    transposed = insert(graph, gemm, "Transpose", [weight], f"{weight.name}.transposed", perm=[1, 0])
    value = insert(graph, gemm, "MatMul", [x, transposed], f"{weight.name}.product")
    if bias:
        value = insert(graph, gemm, "Add", [value, bias[0]], f"{weight.name}.with_bias")
    ir.convenience.replace_all_uses_with(gemm.outputs[0], value)
    graph.remove(gemm, safe=True)
    return transposed.producer()


def cast(
    graph: ir.Graph, node: ir.Node, value: ir.Value, dtype: ir.DataType, name: str, shared: SharedValues
) -> ir.Value:
    """``value``, the input of ``node`` or made of it, in another type."""
    key = (value, dtype)
    if key not in shared:
        shared[key] = insert(graph, node, "Cast", [value], name, to=dtype)
    return shared[key]


def smoothed_input(
    graph: ir.Graph, node: ir.Node, value: ir.Value, layer: LayerAssignment, dtype: ir.DataType, shared: SharedValues
) -> ir.Value:
    """The layer's input ``value`` times its ``pre_quant_scale``, unless that is folded into an earlier layer."""
    if not layer.multiplies:
        return value
    key = (value, id(layer.pre_quant_scale))
    if key not in shared:
        scale = numbers(graph, f"{layer.name}.pre_quant_scale", layer.pre_quant_scale.half(), dtype)
        shared[key] = insert(graph, node, "Mul", [value, scale], f"{layer.name}.smoothed")
    return shared[key]


def rotated_input(
    graph: ir.Graph, node: ir.Node, value: ir.Value, layer: LayerAssignment, dtype: ir.DataType, shared: SharedValues
) -> ir.Value:
    """``value`` [..., in] with its groups of channels rotated, if the layer rotates them.

    Its shape is computed in the graph, because text and image have different axes.
    """
    if not layer.rotation:
        return value
    key = (value, "rotated", layer.rotation)
    if key not in shared:
        name, group = f"{layer.name}.input", layer.rotation
        shape = insert(graph, node, "Shape", [value], f"{name}_shape")
        leading = insert(graph, node, "Shape", [value], f"{name}_leading", start=0, end=-1)
        groups = constant(graph, f"{name}_groups", np.array([layer.weight_shape[1] // group, group], np.int64))
        grouped = insert(graph, node, "Concat", [leading, groups], f"{name}_grouped_shape", axis=0)
        if ("rotation", group) not in shared:  # one for all layers: it is as large as a small layer's codes
            shared["rotation", group] = numbers(graph, f"rotation_of_{group}", rotation_matrix(group), dtype)
        grouped = insert(graph, node, "Reshape", [value, grouped], f"{name}_grouped")
        product = insert(graph, node, "MatMul", [grouped, shared["rotation", group]], f"{name}_rotated_groups")
        shared[key] = insert(graph, node, "Reshape", [product, shape], f"{name}_rotated")
    return shared[key]


def quantized_per_token(
    graph: ir.Graph,
    node: ir.Node,
    value: ir.Value,
    layer: LayerAssignment,
    dtype: ir.DataType,
    shared: SharedValues,
    rows: bool,
) -> ir.Value:
    """``value`` divided by each token's largest magnitude, quantized and dequantized.

    That magnitude multiplies the output of ``node``, or the result where the layer does not scale its product.
    """
    key, name = (value, "largest"), f"{layer.name}.input"
    if key not in shared:
        last = constant(graph, f"{name}_last", np.array([-1], np.int64))
        smallest = numbers(graph, f"{name}_smallest", SMALLEST_TOKEN, dtype)
        largest = insert(graph, node, "Abs", [value], f"{name}_magnitude")
        largest = insert(graph, node, "ReduceMax", [largest, last], f"{name}_largest_number", keepdims=1)
        shared[key] = insert(graph, node, "Max", [largest, smallest], f"{name}_largest")
    largest = shared[key]
    over = (value, "over its largest")
    if over not in shared:
        shared[over] = insert(graph, node, "Div", [value, largest], f"{name}_over_largest")
    rounded = quantized_input(graph, node, shared[over], layer, dtype, shared, rows)
    if layer.scales_product:
        name = f"{layer.name}.times_largest"
        read_instead(node.outputs[0], lambda before, y: insert(graph, before, "Mul", [y, largest], name))
        return rounded
    times = (rounded, "times its largest")
    if times not in shared:
        shared[times] = insert(graph, node, "Mul", [rounded, largest], f"{layer.name}.input_times_largest")
    return shared[times]


def quantized_input(
    graph: ir.Graph,
    node: ir.Node,
    value: ir.Value,
    layer: LayerAssignment,
    dtype: ir.DataType,
    shared: SharedValues,
    rows: bool,
) -> ir.Value:
    """``value`` quantized and dequantized; layers that read it with the same scales share the result."""
    static = layer.activation_scale
    key = (value, layer.activation_format, layer.activation_amax if static is None else static)
    if key not in shared:
        name, fmt = f"{layer.name}.input", FORMATS[layer.activation_format]
        if static is None:
            shared[key] = dynamic_copy(graph, node, value, name, layer, rows, dtype)
        else:
            shared[key] = static_copy(graph, node, value, name, fmt, static, dtype)
    return shared[key]


def quantize_shifted(graph: ir.Graph, conv: ir.Node, x: ir.Value, layer: LayerAssignment, dtype: ir.DataType) -> None:
    """Let ``conv`` read ``x`` minus the shift, quantized and padded, with the corresponding bias.

    TensorRT supports no constant of the codes' type for Pad, so the code of zero is computed in the graph.
    """
    name, fmt = f"{layer.name}.input", FORMATS[layer.activation_format]
    scales = static_scales(graph, name, fmt, layer.activation_scale, dtype)
    shift = numbers(graph, f"{name}_shift", layer.shift, dtype)
    value = insert(graph, conv, "Sub", [x, shift], f"{name}_shifted")
    value = insert(graph, conv, "QuantizeLinear", [value, *scales], f"{name}_quantized")
    top, left, bottom, right = conv.attributes["pads"].as_ints()
    if any((top, left, bottom, right)):
        padding = constant(graph, f"{name}_padding", np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
        zero = numbers(graph, f"{name}_shifted_zero", -layer.shift, dtype)
        zero = insert(graph, conv, "QuantizeLinear", [zero, *scales], f"{name}_quantized_zero")
        value = insert(graph, conv, "Pad", [value, padding, zero], f"{name}_padded")
        conv.attributes["pads"] = ir.AttrInt64s("pads", [0, 0, 0, 0])
    conv.replace_input_with(0, insert(graph, conv, "DequantizeLinear", [value, *scales], f"{name}_dequantized"))
    conv.resize_inputs(3)
    conv.replace_input_with(2, numbers(graph, f"{layer.name}.shifted_bias", layer.bias, dtype))


def add_low_rank(graph: ir.Graph, node: ir.Node, x: ir.Value, layer: LayerAssignment, dtype: ir.DataType) -> None:
    """Replace the output ``y`` of ``node`` by ``y + (x @ down^T) @ up^T``."""
    up, down = (
        numbers(graph, f"{layer.name}.{name}", factor.T.contiguous(), dtype)
        for name, factor in zip(("up", "down"), layer.low_rank, strict=True)
    )

    def with_low_rank(before: ir.Node, y: ir.Value) -> ir.Value:
        value = insert(graph, before, "MatMul", [x, down], f"{layer.name}.low_rank_down")
        value = insert(graph, before, "MatMul", [value, up], f"{layer.name}.low_rank_up")
        return insert(graph, before, "Add", [y, value], f"{layer.name}.with_low_rank")

    read_instead(node.outputs[0], with_low_rank)
