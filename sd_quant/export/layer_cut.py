"""The quantized layers of an exported graph on their own, to compare each with torch on the same input.

Errors of a whole quantized network say little about its export: one input that rounds the other way in the first layer
changes everything behind it. So every quantized layer becomes an input and an output of one flat graph.
"""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment


def cut_layers(onnx_path: Path, assignment: Mapping[str, LayerAssignment], path: Path) -> list[str]:
    """Write a graph with an input ``<layer>`` and an output ``<layer>.output`` per quantized layer; returns the names.

    The output is that of the Conv (bias included) or of the MatMul (bias excluded).
    """
    model = ir.load(onnx_path)
    nodes = {node.outputs[0].name: node for node in model.graph}
    quantized = [layer for layer in assignment.values() if layer.format == "int8"]
    inputs, outputs = [], []
    for layer in quantized:
        first = nodes[
            f"{layer.name}.smoothed" if layer.pre_quant_scale is not None else f"{layer.name}.input_quantized"
        ]
        last = next(iter(nodes[f"{layer.name}.input_dequantized"].outputs[0].uses())).node
        channels = layer.weight_shape[1]
        shape = [None, channels, None, None] if len(layer.weight_shape) == 4 else [None, None, channels]
        value = ir.Value(name=layer.name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT16))
        first.replace_input_with(0, value)
        output = last.outputs[0]
        output.name, output.type = f"{layer.name}.output", ir.TensorType(ir.DataType.FLOAT16)
        output.shape = ir.Shape([None] * len(shape))
        inputs.append(value)
        outputs.append(output)
    model.graph.inputs[:] = inputs
    model.graph.outputs[:] = outputs
    ir.passes.common.RemoveUnusedNodesPass()(model)
    with atomic_path(path) as temporary:
        ir.save(model, temporary)
    return [layer.name for layer in quantized]
