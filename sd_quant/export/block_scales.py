"""Inputs that are quantized in blocks, whose scales the graph computes while it runs, in ONNX's ordinary operations.

    x ─┬─ Reshape ─ Abs ─ ReduceMax ─ scale of the format ─┬───────────┐
       └──────────────────────────────────── QuantizeLinear(block) ─ DequantizeLinear(block) ─ y

The road not taken is TensorRT's ``TRT_FP4DynamicQuantize``, which one of the formats could use. No other runtime knows
it, so nothing could check what it computes, and TensorRT builds plans from these operations as well.

The range of a block is computed in fp32, and the scale is rounded once, to what the format stores, as in ``formats``.
"""

import numpy as np
import onnx_ir as ir
import torch

from sd_quant.export.nodes import constant, insert
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS


def dynamic_copy(
    graph: ir.Graph, before: ir.Node, value: ir.Value, name: str, layer: LayerAssignment, rows: bool = False
) -> ir.Value:
    """``value``, an input of ``layer``, quantized and dequantized in blocks of its last axis.

    The shape is [batch, tokens, in], or any other that ends in the layer's inputs if ``rows`` is true.
    """
    fmt, inputs_of_layer, inserted = FORMATS[layer.activation_format], layer.weight_shape[1], 0
    global_scale = layer.activation_scales(torch.zeros(fmt.block))[-1].max().item()  # formats without one ignore it

    def apply(op_type: str, *inputs: ir.Value | float, **attributes) -> ir.Value:
        nonlocal inserted
        inserted += 1
        values = [
            value if isinstance(value, ir.Value) else constant(graph, f"{name}.{inserted}.{index}", np.float32(value))
            for index, value in enumerate(inputs)
        ]
        types = {key: ir.DataType[value] if isinstance(value, str) else value for key, value in attributes.items()}
        return insert(graph, before, op_type, values, f"{name}.{op_type}.{inserted}", **types)

    inner = [inputs_of_layer // fmt.block, fmt.block]
    blocks = constant(graph, f"{name}.blocks", np.array(inner if rows else [0, 0, *inner], np.int64))
    if rows:
        leading = insert(graph, before, "Shape", [value], f"{name}.leading", start=0, end=-1)
        blocks = insert(graph, before, "Concat", [leading, blocks], f"{name}.shape", axis=0)
    last = constant(graph, f"{name}.last", np.array([-1], np.int64))
    amax = apply("ReduceMax", apply("Abs", apply("Reshape", value, blocks)), last, keepdims=0)
    scale = fmt.onnx_scale(apply, apply("Cast", amax, to="FLOAT"), global_scale)
    blocked = {"axis": -1, "block_size": fmt.block}
    codes = apply("QuantizeLinear", value, scale, output_dtype=fmt.onnx_type, **blocked)
    return insert(graph, before, "DequantizeLinear", [codes, scale], f"{name}_dequantized", **blocked)
