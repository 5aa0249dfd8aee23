"""Inputs that are scaled in blocks while the network runs, in ONNX's ordinary operations.

    x ─┬─ Reshape ─ Abs ─ ReduceMax ─ scale of the format ─┬───────────┐
       └──────────────────────────────────── QuantizeLinear(block) ─ DequantizeLinear(block) ─ y

TensorRT has ``TRT_FP4DynamicQuantize`` for one of the formats. It is not taken, because no other runtime knows it, so
nothing could check what it computes; TensorRT builds plans from these as well.

The range is worked on in fp32 and the scale is rounded once, to what the format stores, as ``formats`` does it.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from sd_quant.export.insertion import HALF, constant, insert
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, e2m1, fp8, int4, mxfp4, nvfp4
from sd_quant.quantization.formats.int8 import SMALLEST_SCALE

# A step of the logarithm's rounding, and far less than what two neighbouring fp16 numbers differ in it.
LOGARITHM_ERROR = 1e-5

Apply = Callable[..., ir.Value]  # operation and inputs, where numbers become constants


def int4_scale(apply: Apply, amax: ir.Value, whole: float) -> ir.Value:
    scale = apply("Max", apply("Div", amax, int4.QMAX), SMALLEST_SCALE)
    return apply("Cast", scale, to=ir.DataType.FLOAT16)


def mxfp4_scale(apply: Apply, amax: ir.Value, whole: float) -> ir.Value:
    """2^floor(log2(amax)) / 4."""
    logarithm = apply("Div", apply("Log", apply("Max", amax, 4 * 2.0**mxfp4.SMALLEST_EXPONENT)), float(np.log(2)))
    exponent = apply("Floor", apply("Add", logarithm, LOGARITHM_ERROR))
    scale = apply("Exp", apply("Mul", apply("Sub", exponent, 2.0), float(np.log(2))))
    return apply("Cast", scale, to=ir.DataType.FLOAT16)  # which rounds to the power of two that it nearly is


def nvfp4_scale(apply: Apply, amax: ir.Value, whole: float) -> ir.Value:
    wanted = apply("Max", apply("Div", amax, e2m1.LARGEST), nvfp4.SMALLEST_SCALE * whole)
    codes = apply("QuantizeLinear", wanted, whole, output_dtype=ir.DataType[fp8.ONNX_TYPE])
    return apply("DequantizeLinear", codes, whole, **HALF)


SCALES: dict[str, Callable[[Apply, ir.Value, float], ir.Value]] = {
    "int4": int4_scale,
    "mxfp4": mxfp4_scale,
    "nvfp4": nvfp4_scale,
}


def dynamic_copy(
    graph: ir.Graph, before: ir.Node, value: ir.Value, name: str, layer: LayerAssignment, rows: bool = False
) -> ir.Value:
    """``value`` [batch, rows, in], or of any rank with ``rows``, an input of the layer, as its format keeps it."""
    found, numbers, made = FORMATS[layer.activation_format], layer.weight_shape[1], 0
    whole = layer.activation_scales(torch.zeros(found.BLOCK))[-1].max().item()  # the global scale, where there is one

    def apply(op_type: str, *inputs: ir.Value | float, **attributes) -> ir.Value:
        nonlocal made
        made += 1
        values = [
            given if isinstance(given, ir.Value) else constant(graph, f"{name}.{made}.{index}", np.float32(given))
            for index, given in enumerate(inputs)
        ]
        return insert(graph, before, op_type, values, f"{name}.{op_type}.{made}", **attributes)

    inner = [numbers // found.BLOCK, found.BLOCK]
    blocks = constant(graph, f"{name}.blocks", np.array(inner if rows else [0, 0, *inner], np.int64))
    if rows:
        leading = insert(graph, before, "Shape", [value], f"{name}.leading", start=0, end=-1)
        blocks = insert(graph, before, "Concat", [leading, blocks], f"{name}.shape", axis=0)
    last = constant(graph, f"{name}.last", np.array([-1], np.int64))
    amax = apply("ReduceMax", apply("Abs", apply("Reshape", value, blocks)), last, keepdims=0)
    scale = SCALES[layer.activation_format](apply, apply("Cast", amax, to=ir.DataType.FLOAT), whole)
    blocked = {"axis": -1, "block_size": found.BLOCK}
    codes = apply("QuantizeLinear", value, scale, output_dtype=ir.DataType[found.ONNX_TYPE], **blocked)
    return insert(graph, before, "DequantizeLinear", [codes, scale], f"{name}_dequantized", **blocked)
