"""The quantized layers of an exported graph on their own, to compare each with torch on the same input.

Errors of a whole quantized network say little about its export: one input that rounds the other way in the first layer
changes everything behind it. So every quantized layer becomes an input and an output of one flat graph.
"""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from sd_quant.export.qdq import save
from sd_quant.quantization.assignment import LayerAssignment


def cut_layers(onnx_path: Path, assignment: Mapping[str, LayerAssignment], path: Path, prefix: str) -> dict[str, str]:
    """Write a graph with an output ``<layer>.output`` per quantized layer; returns the input that each layer reads.

    The output is that of the Conv (bias included) or of the MatMul (bias excluded). Layers that share a quantized input
    share it here too, and it has the name of one of them.
    """
    model = ir.load(onnx_path)
    makers = {node.outputs[0].name: node for node in model.graph}
    inputs: dict[ir.Node, ir.Value] = {}
    outputs, reads = [], {}
    for layer in assignment.values():
        if layer.format is None:
            continue
        weight = makers.get(f"{prefix}{layer.name}.weight.shaped") or makers[f"{prefix}{layer.name}.weight.dequantized"]
        (last,) = [usage.node for usage in weight.outputs[0].uses()]
        first = last if layer.activation_format is None else last.inputs[0].producer().inputs[0].producer()
        smoothing = first.inputs[0].producer()
        if layer.multiplies and smoothing is not None:
            first = smoothing
        channels = layer.weight_shape[1]
        shape = [None, channels, None, None] if len(layer.weight_shape) == 4 else [None, None, channels]
        if first not in inputs:
            value = ir.Value(name=layer.name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT16))
            for reader in (first, *finding_its_range(first)):
                reader.replace_input_with(0, value)
            inputs[first] = value
        reads[layer.name] = inputs[first].name
        output = last.outputs[0]
        output.name, output.type = f"{layer.name}.output", ir.TensorType(ir.DataType.FLOAT16)
        output.shape = ir.Shape([None] * len(shape))
        outputs.append(output)
    model.graph.inputs[:] = inputs.values()
    model.graph.outputs[:] = outputs
    ir.passes.common.RemoveUnusedNodesPass()(model)
    save(model, path)
    return reads


def finding_its_range(quantizer: ir.Node) -> list[ir.Node]:
    """Of a quantizer in blocks the nodes that read the same input to find their ranges (``dynamic_copy``)."""
    scope = quantizer.name.partition(".QuantizeLinear.")[0]
    names = (f"{scope}.Reshape.1", f"{scope}.leading")
    return [usage.node for usage in quantizer.inputs[0].uses() if usage.node.name in names]
