"""Cut the quantized layers out of an exported graph, to compare each layer with torch on the same input.

The error of a whole quantized network says little about its export: one value that rounds the other way in the first
layer changes all later layers. So a graph is written in which every quantized layer has its own input and output.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import onnx
import onnx_ir as ir
import torch

from sd_quant.export.attention import MASK, ROW_SUM, nearest_producer
from sd_quant.export.nodes import only_reader, onnx_type, type_of_scales
from sd_quant.export.onnx_file import save
from sd_quant.quantization.assignment import LayerAssignment

Found = TypeVar("Found")
OF_INPUT = re.compile(r"\.input[._]")  # in the names of nodes that quantize a layer's input, see ``qdq``


def cut_layers(
    onnx_path: Path,
    assignment: Mapping[str, LayerAssignment],
    path: Path,
    prefix: str,
    weights: torch.dtype = torch.float16,
) -> dict[str, str]:
    """Write a graph of the separate quantized layers to ``path``, and return the graph input's name for each layer.

    ``weights`` is the dtype of the unquantized weights and of the inputs. A layer's output, ``<layer>.output``, is that
    of its Conv (with bias) or of its MatMul (without bias). Layers that share a quantized input also share the graph
    input, which has the name of one of these layers. ``prefix`` precedes the layers' names in the graph.
    """
    model = ir.load(onnx_path)
    values = {**{node.outputs[0].name: node.outputs[0] for node in model.graph}, **model.graph.initializers}
    inputs: dict[ir.Node, ir.Value] = {}
    outputs, reads, dtype = [], {}, onnx_type(weights)
    for layer in assignment.values():
        if layer.format is None:
            continue
        weight = dequantized_weight(values, f"{prefix}{layer.name}.weight")
        last = only_reader(weight)
        wide = bool(layer.activation_format or layer.multiplies or layer.rotation)
        scales = type_of_scales(dtype)
        untouched = not wide or (not (layer.activation_format or layer.rotation) and scales == dtype)
        readers = [(last, 0)] if untouched else readers_of_input(last)
        if layer.multiplies:
            reader, index = readers[0]
            readers = [(reader.inputs[index].producer(), 0)]
        first = readers[0][0]
        channels = layer.weight_shape[1]
        shape = [None, channels, None, None] if len(layer.weight_shape) == 4 else [None, None, channels]
        if first not in inputs:
            value = ir.Value(name=layer.name, shape=ir.Shape(shape), type=ir.TensorType(scales if wide else dtype))
            for reader, index in readers:
                reader.replace_input_with(index, value)
            inputs[first] = value
        reads[layer.name] = inputs[first].name
        output = last.outputs[0]
        if layer.scales_product:
            output = only_reader(output).outputs[0]
        output.name = f"{layer.name}.output"
        output.type = ir.TensorType(scales if layer.activation_format else dtype)
        output.shape = ir.Shape([None] * len(shape))
        outputs.append(output)
    model.graph.inputs[:] = inputs.values()
    model.graph.outputs[:] = outputs
    ir.passes.common.RemoveUnusedNodesPass()(model)
    save(model, path)
    return reads


def dequantized_weight(values: Mapping[str, Found], weight: str) -> Found:
    """Return the entry of ``values`` (by graph value) for ``weight`` after DequantizeLinear, Reshape and Cast."""
    return next(values[name] for end in ("cast", "shaped", "dequantized") if (name := f"{weight}.{end}") in values)


def readers_of_input(product: ir.Node) -> list[tuple[ir.Node, int]]:
    """Return (node, index of its input) for each node that reads the input of ``product`` before it is quantized."""
    nodes, readers = [product.inputs[0].producer()], []
    for node in nodes:
        for index, value in enumerate(node.inputs):
            producer = value.producer()
            if producer is not None and OF_INPUT.search(producer.name):
                nodes += [producer] if producer not in nodes else []
            elif not value.is_initializer():
                readers.append((node, index))
    return readers


def cut_attentions(
    onnx_path: Path, attentions: Iterable[LayerAssignment], path: Path, weights: torch.dtype = torch.float16
) -> None:
    """Write a graph of only the quantized ``attentions``, without masks, to ``path``.

    Each attention has the unquantized inputs ``<attention>.given_query``, ``.given_key`` (transposed: [B, heads,
    head_width, tokens]) and ``.given_value``, and the output ``<attention>.given_output``.
    """
    model = ir.load(onnx_path)
    made = {node.outputs[0].name: node for node in model.graph}
    inputs, outputs, dtype = [], [], onnx_type(weights)
    scales = type_of_scales(dtype)

    def named(value: ir.Value, name: str, kind: ir.DataType) -> ir.Value:
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape([None] * 4)
        return value

    for layer in attentions:
        if in_integers := f"{layer.name}{ROW_SUM}" in made:
            firsts = [made[f"{layer.name}.{what}"] for what in ("query", "key_minus_mean", "value")]
            last = made[f"{layer.name}.output"]
        else:
            firsts = [made[f"{layer.name}.{what}_quantized"] for what in ("query", "key", "value")]
            last = only_reader(made[f"{layer.name}.value_dequantized"].outputs[0])
            last = only_reader(last.outputs[0]) if last.op_type == "Cast" else last  # in a graph of bf16
            softmax = nearest_producer(made[f"{layer.name}.softmax_quantized"].inputs[0], "Softmax")
            if (masked := softmax.inputs[0].producer()).op_type == MASK:
                softmax.replace_input_with(0, masked.inputs[0])
        for what, first in zip(("query", "key", "value"), firsts, strict=True):
            inputs.append(named(ir.Value(), f"{layer.name}.given_{what}", scales))
            first.replace_input_with(0, inputs[-1])
        outputs.append(named(last.outputs[0], f"{layer.name}.given_output", scales if in_integers else dtype))
    model.graph.inputs[:], model.graph.outputs[:] = inputs, outputs
    ir.passes.common.RemoveUnusedNodesPass()(model)
    save(model, path)


def names_of_products(onnx_path: Path, assignment: Mapping[str, LayerAssignment], prefix: str) -> dict[str, list[str]]:
    """Return the names under which a runtime may list each quantized layer's or attention's matrix product.

    These are the names of the product's node, of the nodes after it that runtimes fuse (scale per token, Cast, bias),
    and of their outputs.
    """
    nodes = onnx.load(onnx_path, load_external_data=False).graph.node
    readers = {value: node for node in nodes for value in node.input}
    names = {}
    for layer in assignment.values():
        for product, operand in zip(layer.attention_products, ("query", "value"), strict=False):
            node = readers[f"{layer.name}.{operand}_dequantized"]
            names[product] = [node.name, node.output[0]]
    for layer in (layer for layer in assignment.values() if layer.format is not None):
        product = dequantized_weight(readers, f"{prefix}{layer.name}.weight")
        fused = [product]
        for fusable in ("Mul", "Cast", "Add") if layer.scales_product else ("Cast", "Add"):
            reader = readers.get(fused[-1].output[0])
            fused += [reader] if reader is not None and reader.op_type == fusable else []
        names[layer.name] = [name for node in fused for name in (node.name, node.output[0])]
    return names
