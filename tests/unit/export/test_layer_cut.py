"""Every quantized layer of the exported graph against ModelOpt's simulation of it, on the inputs it has there."""

import onnx
import pytest
import torch

from sd_quant.engines.onnxruntime import load
from sd_quant.export.layer_cut import cut_layers
from sd_quant.metrics.fidelity import relative_error
from sd_quant.quantization.simulate import simulate

# The smoothed input is fp16 in the engine; what it rounds to the other side moves one whole step. Measured: 2.5e-3.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def layers(quantized, assignment, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "layers.onnx"
    return path, cut_layers(quantized, assignment, path)


def test_one_input_and_one_output_per_quantized_layer(layers, assignment):
    path, names = layers
    assert names == [name for name, layer in assignment.items() if layer.format]
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == names
    assert [value.name for value in graph.output] == [f"{name}.output" for name in names]


def test_nothing_else_is_left(layers, assignment):
    path, names = layers
    operators = [node.op_type for node in onnx.load(path).graph.node]
    linears = sum(assignment[name].role != "conv" for name in names)
    expected = {"QuantizeLinear": len(names), "DequantizeLinear": 2 * len(names), "Mul": linears, "MatMul": linears,
                "Conv": len(names) - linears}  # fmt: skip
    assert {operator: operators.count(operator) for operator in set(operators)} == expected


@torch.no_grad()
def test_each_layer_computes_what_the_simulation_does(layers, calibrated, assignment, unet_inputs):
    path, names = layers
    part, seen = calibrated.part(), {}
    unet = simulate(part.unet, assignment)
    for name in names:
        unet.get_submodule(name).register_forward_pre_hook(
            lambda layer, inputs, name=name: seen.__setitem__(name, inputs[0].half())
        )
    part(**unet_inputs(2, seed=3))
    seen = dict(seen)
    outputs = load(path, threads=1)(**seen)
    errors = {}
    for name in names:
        layer = unet.get_submodule(name)
        bias = layer.bias if layer.bias is not None and assignment[name].role != "conv" else 0  # MatMul comes before it
        errors[name] = relative_error(layer(seen[name].float()) - bias, outputs[f"{name}.output"].float())
    assert max(errors.values()) < TOLERANCE, max(errors, key=errors.get)
