"""Quantize the two matrix products of an attention in an ONNX graph, and restore its Softmax for TensorRT.

For floating-point formats, QuantizeLinear and DequantizeLinear are inserted before both products. For integer formats,
the Softmax is replaced, too (``quantization.attention``):

    query ─ Mul ──────────────── Q ─ DQ ┐
    key ─ Sub(key_mean) ─ Mul ── Q ─ DQ ┴ MatMul ─ Q ─ DQ ┬──────────── Sub ─ Mul ─ Exp ─ Q ─ DQ ┬─ MatMul ─ Div ─ Mul
                                                          └ ReduceMax ──┘                        └─ ReduceSum ─┘

The second MatMul also reads the value, scaled and quantized. OpenVINO runs both products in INT8 and the rest in one
kernel. TensorRT supports no UINT8, and has one kernel for unquantized attention.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor

from sd_quant.cache import link
from sd_quant.errors import ArtifactError
from sd_quant.export.nodes import (
    constant,
    initializer,
    insert,
    numbers,
    only_reader,
    read_instead,
    static_copy,
    type_of_scales,
)
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.attention import float_scales, head_factors
from sd_quant.quantization.formats import FORMATS

ROW_SUM = ".attention_row_sum"  # suffix of a node's name that only attention in integers has
# Possible nodes between a product and its reader: a joint attention slices or splits off the image's tokens, and a
# single block of Flux appends its feed-forward to each token.
MOVES = ("Reshape", "Transpose", "Cast", "Slice", "Split", "Concat")
MASK = "Add"  # between scores and softmax


def attention_before(linear: str) -> str:
    """Return the name of the attention with the output projection ``linear`` (``to_out.0``, in Flux's single blocks
    ``proj_out``); for other linears, a name that no attention has."""
    attention, found, _ = linear.rpartition(".to_out.0")
    return attention if found else linear.removesuffix("proj_out") + "attn"


def quantize_attention(weight: ir.Value, layer: LayerAssignment) -> None:
    """Quantize both matrix products of the attention whose output projection multiplies with ``weight``."""
    node = only_reader(weight)
    if node.op_type == "Transpose":
        node = only_reader(node.outputs[0])
    mixed = nearest_producer(node.inputs[0], "MatMul")
    softmax = nearest_producer(mixed.inputs[0], "Softmax")
    scores = nearest_producer(softmax.inputs[0], "MatMul", (*MOVES, MASK))
    fmt, scales = FORMATS[layer.activation_format], type_of_scales(weight.dtype)
    if fmt.equal_levels:
        if scales != weight.dtype:
            in_fp32((scores, mixed), layer.name, weight.dtype)
        return quantize_by_rows(scores, softmax, mixed, layer, scales)
    products = ((scores, 0, "query"), (scores, 1, "key"), (mixed, 1, "value"), (mixed, 0, "softmax"))
    for (node, index, what), scale in zip(products, float_scales(layer), strict=True):
        value, name = node.inputs[index], f"{layer.name}.{what}"
        if scales != weight.dtype:
            value = insert(node, "Cast", [value], f"{name}_in_fp32", to=scales)
        value = static_copy(node, value, name, fmt, scale, scales)
        if scales != weight.dtype:
            value = insert(node, "Cast", [value], f"{name}_rounded", to=weight.dtype)
        node.replace_input_with(index, value)


def in_fp32(products: Sequence[ir.Node], attention: str, dtype: ir.DataType) -> None:
    """Cast the inputs of an attention's two products to fp32, and the output of the second product to ``dtype``."""
    scores, mixed = products
    cast = lambda before, each, what, to: insert(before, "Cast", [each], f"{attention}.{what}", to=to)  # noqa: E731
    for node, index, what in ((scores, 0, "query"), (scores, 1, "key"), (mixed, 1, "value")):
        node.replace_input_with(index, cast(node, node.inputs[index], f"{what}_in_fp32", ir.DataType.FLOAT))
    read_instead(mixed.outputs[0], lambda before, y: cast(before, y, "output_rounded", dtype))


def quantize_by_rows(
    scores: ir.Node, softmax: ir.Node, mixed: ir.Node, layer: LayerAssignment, dtype: ir.DataType
) -> None:
    """Quantize the inputs of MatMuls ``scores`` (Q K^T) and ``mixed`` (P V) to integers; ``softmax`` is replaced."""
    found, fmt, graph = head_factors(layer), FORMATS[layer.activation_format], softmax.graph

    def head_constant(what: str, values: Tensor) -> ir.Value:
        return numbers(graph, f"{layer.name}.{what}", values, dtype)

    def pair(before: ir.Node, value: ir.Value, what: str, scale: float) -> ir.Value:
        return static_copy(before, value, f"{layer.name}.{what}", fmt, scale, dtype)

    def times(before: ir.Node, value: ir.Value, what: str, factor: Tensor) -> ir.Value:
        return insert(before, "Mul", [value, head_constant(f"{what}_factor", factor)], f"{layer.name}.{what}")

    query, key, value = scores.inputs[0], scores.inputs[1], mixed.inputs[1]
    scores.replace_input_with(0, pair(scores, times(scores, query, "query", found.query), "query", found.unit_scale))
    mean = head_constant("key_mean", layer.key_mean[:, :, None])  # keys are transposed here: [heads, head_width, 1]
    key = insert(scores, "Sub", [key, mean], f"{layer.name}.key_minus_mean")
    scores.replace_input_with(1, pair(scores, times(scores, key, "key", found.key), "key", found.key_scale))
    rounded = pair(softmax, scores.outputs[0], "scores", found.unit_scale)
    axis = constant(graph, f"{layer.name}.row", np.array([-1], np.int64))
    largest = insert(softmax, "ReduceMax", [rounded, axis], f"{layer.name}.largest_score", keepdims=1)
    logits = insert(softmax, "Sub", [rounded, largest], f"{layer.name}.scores_minus_largest")
    logits = times(softmax, logits, "logits", found.logit)
    exponentials = insert(softmax, "Exp", [logits], f"{layer.name}.exponentials")
    name = f"{layer.name}.exponentials"
    unsigned = [
        numbers(graph, f"{name}_scale", found.exponential_scale, dtype),
        initializer(graph, f"{name}_zero_point", ir.DataType.UINT8, (), lambda: torch.zeros((), dtype=torch.uint8)),
    ]
    exponentials = insert(softmax, "QuantizeLinear", [exponentials, *unsigned], f"{name}_quantized")
    exponentials = insert(softmax, "DequantizeLinear", [exponentials, *unsigned], f"{name}_dequantized")
    mixed.replace_input_with(0, exponentials)
    mixed.replace_input_with(1, pair(mixed, times(mixed, value, "value", found.value), "value", found.unit_scale))

    def weighted_mean(before: ir.Node, product: ir.Value) -> ir.Value:
        row_sum = insert(before, "ReduceSum", [exponentials, axis], f"{layer.name}{ROW_SUM}", keepdims=1)
        output = insert(before, "Div", [product, row_sum], f"{layer.name}.mean_of_values")
        return times(before, output, "output", found.output)

    read_instead(mixed.outputs[0], weighted_mean)
    graph.remove(softmax, safe=True)


def with_softmax(onnx_path: Path, weights: Sequence[Path], folder: Path) -> Path:
    """Undo integer attention: write the graph with its original attention to ``folder``, and return the new path.

    Returns ``onnx_path`` if no attention is in integers. The files of ``weights`` are linked, not copied.
    """
    model = ir.load(onnx_path)
    sums = [node for node in model.graph if (node.name or "").endswith(ROW_SUM)]
    if not sums:
        return onnx_path
    made = {node.outputs[0].name: node for node in model.graph}
    for row_sum in sums:
        name = row_sum.name.removesuffix(ROW_SUM)
        scores = made[f"{name}.scores_quantized"].inputs[0].producer()
        output = made[f"{name}.output"].outputs[0]
        mixed = made[f"{name}.mean_of_values"].inputs[0].producer()
        scores.replace_input_with(0, made[f"{name}.query"].inputs[0])
        scores.replace_input_with(1, made[f"{name}.key_minus_mean"].inputs[0])
        softmax = insert(mixed, "Softmax", [scores.outputs[0]], f"{name}.softmax", axis=-1)
        mixed.replace_input_with(0, softmax)
        mixed.replace_input_with(1, made[f"{name}.value"].inputs[0])
        ir.convenience.replace_all_uses_with(output, mixed.outputs[0])
    passes.RemoveUnusedNodesPass()(model)
    for file in weights:
        link(file, folder / file.name)
    ir.save(model, folder / onnx_path.name)
    return folder / onnx_path.name


def nearest_producer(value: ir.Value, op_type: str, through: Sequence[str] = MOVES) -> ir.Node:
    """Return the first ``op_type`` node upstream of ``value``, by way of first inputs of nodes of types ``through``.

    Raises ArtifactError if there is no such node.
    """
    node = value.producer()
    while node is not None and node.op_type != op_type:
        node = node.inputs[0].producer() if node.op_type in through else None
    if node is None:
        raise ArtifactError(f"the graph has no {op_type} in front of {value.name}, where an attention's should be")
    return node
