"""Inputs that are scaled in blocks while the network runs, in ONNX's ordinary operations.

    x ─┬─ Reshape ─ Abs ─ ReduceMax ─ scale of the format ─┬───────────┐
       └──────────────────────────────────── QuantizeLinear(block) ─ DequantizeLinear(block) ─ y

TensorRT has ``TRT_FP4DynamicQuantize`` for one of the formats. It is not taken, because no other runtime knows it, so
nothing could check what it computes; TensorRT builds plans from these as well.

The range is worked on in fp32 and the scale is rounded once, to what the format stores, as ``formats`` does it.
"""

import numpy as np
import onnx_ir as ir
import torch

from sd_quant.export.insertion import constant, insert
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS


def dynamic_copy(
    graph: ir.Graph, before: ir.Node, value: ir.Value, name: str, layer: LayerAssignment, rows: bool = False
) -> ir.Value:
    """``value`` [batch, rows, in], or of any rank with ``rows``, an input of the layer, as its format keeps it."""
    fmt, numbers, made = FORMATS[layer.activation_format], layer.weight_shape[1], 0
    global_scale = layer.activation_scales(torch.zeros(fmt.block))[-1].max().item()  # the last, where there is one

    def apply(op_type: str, *inputs: ir.Value | float, **attributes) -> ir.Value:
        nonlocal made
        made += 1
        values = [
            given if isinstance(given, ir.Value) else constant(graph, f"{name}.{made}.{index}", np.float32(given))
            for index, given in enumerate(inputs)
        ]
        types = {key: ir.DataType[value] if isinstance(value, str) else value for key, value in attributes.items()}
        return insert(graph, before, op_type, values, f"{name}.{op_type}.{made}", **types)

    inner = [numbers // fmt.block, fmt.block]
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
