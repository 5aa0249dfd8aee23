"""Quantize a traced graph: insert QuantizeLinear and DequantizeLinear (Q/DQ) for each layer of an assignment.

    x ─ Mul(pre_quant_scale) ─┬─ QuantizeLinear ─ DequantizeLinear ─┐
                              │     weight ─ DequantizeLinear(scale) ┴─ Conv | MatMul | Gemm ─ (Add) ─ y
                              └─ MatMul(down) ─ MatMul(up) ───────────────────────────────────────┘

Rotated inputs (``quantization.rotation``) pass a Reshape, a MatMul with the matrix and a Reshape before QuantizeLinear.
Inputs with scales per token are divided by each token's largest magnitude, so that one static scale fits all tokens and
every runtime can use integer kernels; OpenVINO supports no QuantizeLinear with scales that the graph computes.

    x ─┬─────────────── Div ─ QuantizeLinear ─ DequantizeLinear ─ MatMul ─ Mul ─ (Add) ─ y
       └ Abs ─ ReduceMax ┴─────────────────────────────────────────────────┘

No runtime multiplies four-bit integers, and TensorRT for RTX fails on such a scaled product. So for these the token's
magnitude multiplies the output of the input's DequantizeLinear, not that of the MatMul.

The input of a convolution may be shifted (``quantization.convolutions``). It is padded after QuantizeLinear, with the
quantized value of zero, so that the shift adds a constant at every pixel, which the bias corrects. Alternatives cost
more (docs/results_speed.md): a Pad before QuantizeLinear moves fp16, and a map added after the convolution depends on
the image's size; TensorRT does not support a zero point in QuantizeLinear.

    x ─ Sub(shift) ─ QuantizeLinear ─ Pad ─ DequantizeLinear ─ Conv without padding, with another bias

In a bf16 graph, a layer computes in fp32 from a Cast before it to its product, so that bf16's eight bits round neither
scales and factors nor the bias of a shifted convolution, which is thirty times as large as the output; runtimes fuse
the Casts. In weight-only quantization, the dequantized weight is rounded to bf16 and the product is bf16.

    x ─ Cast(fp32) ─ Mul ─ QuantizeLinear ─ DequantizeLinear ─ MatMul ─ Cast(bf16) ─ (Add) ─ y

In the graph, a layer is the node that multiplies with its weight. Alternative not taken: tracing a network that
contains quantizers, which would need a new trace for every recipe.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from torch import Tensor

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


def write_onnx(
    model: ir.Model,
    path: Path,
    *,
    inputs: int,
    read: ReadWeight,
    assignment: Mapping[str, LayerAssignment],
    prefix: str = "",
) -> None:
    """Add weights to the traced ``model`` in place, quantize it by the ``assignment``, and write it to ``path``.

    The first ``inputs`` graph inputs are the network's own; the remaining inputs are weights, which ``read`` returns by
    name. In the graph, ``prefix`` precedes the assignment's layer names.
    Raises ArtifactError when the assignment names a layer that the graph does not have.
    """
    graph = model.graph
    weights = list(graph.inputs[inputs:])
    del graph.inputs[inputs:]
    pending = {name for name, layer in assignment.items() if layer.format or layer.activation_format}
    formats = {name for layer in assignment.values() for name in (layer.format, layer.activation_format) if name}
    raise_opset(model, max([OPSET, *(FORMATS[name].opset for name in formats)]))
    shared: dict[tuple, ir.Value] = {}
    for weight in weights:
        linear, _, kind = weight.name.removeprefix(prefix).rpartition(".")
        if (attention := attention_before(linear)) in pending and kind == "weight":
            quantize_attention(weight, assignment[attention])
            pending.discard(attention)
    high_precision = []
    for weight in weights:
        layer_name = weight.name.removeprefix(prefix).rpartition(".")[0]
        if layer_name in pending and weight.name.endswith(".weight"):
            quantize_layer(weight, assignment[layer_name], read, shared)
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


class Site(NamedTuple):
    """The place in the graph where a layer's input is quantized, in type ``dtype``: before the layer's ``node``."""

    node: ir.Node  # the layer's Conv or MatMul
    layer: LayerAssignment
    dtype: ir.DataType  # of the input, and of scales and factors
    rows: bool  # the input has two axes
    shared: dict[tuple, ir.Value]  # inputs, smoothed and quantized, that several layers read

    def insert(self, op_type: str, inputs: list[ir.Value], name: str, **attributes) -> ir.Value:
        """Insert a node, named after the layer, before the layer's node; return its output."""
        return insert(self.node, op_type, inputs, f"{self.layer.name}.{name}", **attributes)

    def numbers(self, name: str, values: Tensor | float) -> ir.Value:
        """Add an initializer with ``values`` in the site's ``dtype``, named after the layer."""
        return numbers(self.node.graph, f"{self.layer.name}.{name}", values, self.dtype)

    def integers(self, name: str, *values: int) -> ir.Value:
        """Add an initializer with int64 ``values``, named after the layer."""
        return constant(self.node.graph, f"{self.layer.name}.{name}", np.array(values, np.int64))

    def once(self, key: tuple, make: Callable[[], ir.Value]) -> ir.Value:
        """Return the value that ``make`` inserted on the first call with this ``key``, which several layers share."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        """Cast ``value``, the layer's input or computed from it, to ``dtype``; layers that read it share the Cast."""
        return self.once((value, dtype), lambda: self.insert("Cast", [value], name, to=dtype))


def quantize_layer(weight: ir.Value, layer: LayerAssignment, read: ReadWeight, shared: dict[tuple, ir.Value]) -> None:
    """Quantize input and weight of the node that reads the graph input ``weight``; ``shared`` has earlier inputs."""
    node = only_reader(weight)
    rows = node.op_type == "Gemm"
    if rows:
        end_in_identity(node)
        node = split_gemm(node)
    transposed = node.op_type == "Transpose"
    if transposed:
        transpose = node
        node = only_reader(transpose.outputs[0])
    end_in_identity(node)
    dtype, scales = weight.dtype, type_of_scales(weight.dtype)
    at = Site(node, layer, scales, rows, shared)
    wide = dtype != scales and (layer.activation_format or layer.multiplies or layer.rotation)
    x = at.cast(node.inputs[0], scales, "in_fp32") if wide else node.inputs[0]
    x = smoothed_input(at, x)
    if layer.low_rank is not None:  # first, so that a product that is scaled per token is scaled before the sum
        add_low_rank(node, at.cast(x, dtype, "input_rounded") if wide else x, layer, dtype)
    product = scales if layer.activation_format else dtype
    if product != dtype:
        name = f"{layer.name}.rounded"
        read_instead(node.outputs[0], lambda before, y: insert(before, "Cast", [y], name, to=dtype))
        if node.op_type == "Conv" and len(node.inputs) > 2:
            node.inputs[2].dtype = product
    if layer.activation_zero_point:
        quantize_shifted(at, x)
    else:
        value = rotated_input(at, x)
        if layer.per_token:
            value = quantized_per_token(at, value)
        elif layer.activation_format:
            value = quantized_input(at, value)
        elif wide:
            value = at.cast(value, dtype, "input_rounded")
        node.replace_input_with(0, value)
    fmt = FORMATS[layer.format]  # scales of blocks are of the format's own type, and make fp16
    made = ir.DataType.FLOAT16 if fmt.block or not fmt.onnx_type or product == ir.DataType.BFLOAT16 else product
    value = quantized_weight(node, weight.name, layer, read, transposed, made)
    if product != made:
        value = insert(node, "Cast", [value], f"{weight.name}.cast", to=product)
    node.replace_input_with(1, value)
    if transposed:
        node.graph.remove(transpose, safe=True)


def end_in_identity(node: ir.Node) -> None:
    """Insert an Identity after ``node`` if it produces a graph output, so that nodes can be inserted between them."""
    product, graph = node.outputs[0], node.graph
    if not product.is_graph_output():
        return
    last = ir.node("Identity", [product])
    output = last.outputs[0]
    output.name, product.name = product.name, f"{product.name}.product"
    output.type, output.shape = product.type, product.shape
    graph.outputs[list(graph.outputs).index(product)] = output
    graph.append(last)


def split_gemm(gemm: ir.Node) -> ir.Node:
    """Replace a Gemm (a linear with two-dimensional input) by Transpose, MatMul and Add; return the Transpose."""
    x, weight, *bias = gemm.inputs
    transposed = insert(gemm, "Transpose", [weight], f"{weight.name}.transposed", perm=[1, 0])
    value = insert(gemm, "MatMul", [x, transposed], f"{weight.name}.product")
    if bias:
        value = insert(gemm, "Add", [value, bias[0]], f"{weight.name}.with_bias")
    ir.convenience.replace_all_uses_with(gemm.outputs[0], value)
    gemm.graph.remove(gemm, safe=True)
    return transposed.producer()


def smoothed_input(at: Site, value: ir.Value) -> ir.Value:
    """Multiply the layer's input by its ``pre_quant_scale``, unless an earlier layer's weights include this scale."""
    layer = at.layer
    if not layer.multiplies:
        return value

    def smoothed() -> ir.Value:
        return at.insert("Mul", [value, at.numbers("pre_quant_scale", layer.pre_quant_scale.half())], "smoothed")

    return at.once((value, id(layer.pre_quant_scale)), smoothed)


def rotated_input(at: Site, value: ir.Value) -> ir.Value:
    """Multiply each group of channels of ``value`` [..., in] by a rotation matrix, if the layer's input is rotated."""
    group = at.layer.rotation
    if not group:
        return value

    def rotated() -> ir.Value:
        shape = at.insert("Shape", [value], "input_shape")
        leading = at.insert("Shape", [value], "input_leading", start=0, end=-1)
        groups = at.integers("input_groups", at.layer.weight_shape[1] // group, group)
        grouped = at.insert("Concat", [leading, groups], "input_grouped_shape", axis=0)
        matrix = at.once(  # one for all layers: it is as large as a small layer's codes
            ("rotation", group),
            lambda: numbers(at.node.graph, f"rotation_of_{group}", rotation_matrix(group), at.dtype),
        )
        grouped = at.insert("Reshape", [value, grouped], "input_grouped")
        product = at.insert("MatMul", [grouped, matrix], "input_rotated_groups")
        return at.insert("Reshape", [product, shape], "input_rotated")

    return at.once((value, "rotated", group), rotated)


def quantized_per_token(at: Site, value: ir.Value) -> ir.Value:
    """Divide ``value`` by each token's largest magnitude, then quantize and dequantize it with one static scale.

    The magnitude multiplies the product's output if ``layer.scales_product``, otherwise the dequantized value.
    """

    def largest_numbers() -> ir.Value:
        last, smallest = at.integers("input_last", -1), at.numbers("input_smallest", SMALLEST_TOKEN)
        largest = at.insert("Abs", [value], "input_magnitude")
        largest = at.insert("ReduceMax", [largest, last], "input_largest_number", keepdims=1)
        return at.insert("Max", [largest, smallest], "input_largest")

    largest = at.once((value, "largest"), largest_numbers)
    over = at.once((value, "over its largest"), lambda: at.insert("Div", [value, largest], "input_over_largest"))
    rounded = quantized_input(at, over)
    if at.layer.scales_product:
        name = f"{at.layer.name}.times_largest"
        read_instead(at.node.outputs[0], lambda before, y: insert(before, "Mul", [y, largest], name))
        return rounded
    times = (rounded, "times its largest")
    return at.once(times, lambda: at.insert("Mul", [rounded, largest], "input_times_largest"))


def quantized_input(at: Site, value: ir.Value) -> ir.Value:
    """Quantize and dequantize ``value``, once for all layers that read it with the same scales."""
    layer, static, name = at.layer, at.layer.activation_scale, f"{at.layer.name}.input"
    if static is None:
        make = lambda: dynamic_copy(at.node, value, name, layer, at.rows, at.dtype)  # noqa: E731
    else:
        fmt = FORMATS[layer.activation_format]
        make = lambda: static_copy(at.node, value, name, fmt, static, at.dtype)  # noqa: E731
    return at.once((value, layer.activation_format, layer.activation_amax if static is None else static), make)


def quantize_shifted(at: Site, x: ir.Value) -> None:
    """Let a convolution read ``x - shift``, quantized and then padded, and replace its bias to correct for the shift.

    The graph computes the quantized padding value, because TensorRT supports no quantized constant for Pad.
    """
    conv, layer, fmt = at.node, at.layer, FORMATS[at.layer.activation_format]
    scales = static_scales(conv.graph, f"{layer.name}.input", fmt, layer.activation_scale, at.dtype)
    value = at.insert("Sub", [x, at.numbers("input_shift", layer.shift)], "input_shifted")
    value = at.insert("QuantizeLinear", [value, *scales], "input_quantized")
    top, left, bottom, right = conv.attributes["pads"].as_ints()
    if any((top, left, bottom, right)):
        padding = at.integers("input_padding", 0, 0, top, left, 0, 0, bottom, right)
        zero = at.numbers("input_shifted_zero", -layer.shift)
        zero = at.insert("QuantizeLinear", [zero, *scales], "input_quantized_zero")
        value = at.insert("Pad", [value, padding, zero], "input_padded")
        conv.attributes["pads"] = ir.AttrInt64s("pads", [0, 0, 0, 0])
    conv.replace_input_with(0, at.insert("DequantizeLinear", [value, *scales], "input_dequantized"))
    conv.resize_inputs(3)
    conv.replace_input_with(2, at.numbers("shifted_bias", layer.bias))


def add_low_rank(node: ir.Node, x: ir.Value, layer: LayerAssignment, dtype: ir.DataType) -> None:
    """Replace the output ``y`` of ``node`` by ``y + (x @ down^T) @ up^T``, the factors of ``layer.low_rank``."""
    up, down = (
        numbers(node.graph, f"{layer.name}.{name}", factor.T.contiguous(), dtype)
        for name, factor in zip(("up", "down"), layer.low_rank, strict=True)
    )

    def with_low_rank(before: ir.Node, y: ir.Value) -> ir.Value:
        value = insert(before, "MatMul", [x, down], f"{layer.name}.low_rank_down")
        value = insert(before, "MatMul", [value, up], f"{layer.name}.low_rank_up")
        return insert(before, "Add", [y, value], f"{layer.name}.with_low_rank")

    read_instead(node.outputs[0], with_low_rank)
