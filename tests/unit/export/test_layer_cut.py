"""Every quantized layer of the exported graph against ModelOpt's simulation of it, on the inputs it has there."""

from collections import Counter

import onnx
import pytest
import torch

from sd_quant.engines.onnxruntime import load
from sd_quant.export.layer_cut import cut_layers
from sd_quant.models.unet import shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.simulation.modelopt import simulate

pytestmark = pytest.mark.slow  # the tracing

# The smoothed input is fp16 in the engine; what it rounds to the other side moves one whole step. Measured: 2.2e-3.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def layers(quantized, assignment, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "layers.onnx"
    return path, cut_layers(quantized, assignment, path, "unet.")


def test_an_output_per_quantized_layer_and_an_input_per_quantized_tensor(layers, assignment, smoothing):
    path, reads = layers
    assert list(reads) == [name for name, layer in assignment.items() if layer.format]
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.output] == [f"{name}.output" for name in reads]
    assert [value.name for value in graph.input] == list(dict.fromkeys(reads.values()))
    readers = {reader: shared.readers for shared in shared_inputs(assignment) for reader in shared.readers}
    for name, read in reads.items():
        assert read in (readers.get(name, (name,)) if smoothing == "folded" else (name,))
    sharing = {
        name: {reads[reader] for reader in readers[name] if reader in reads} for name in reads if name in readers
    }
    if smoothing == "folded":
        assert all(len(inputs) == 1 for inputs in sharing.values())


def test_nothing_else_is_left(layers, assignment):
    path, reads = layers
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    linears = sum(assignment[name].role != "conv" for name in reads)
    multiplied = {read for name, read in reads.items() if assignment[name].multiplies}
    inputs = len(set(reads.values()))
    assert operators == {
        "QuantizeLinear": inputs,
        "DequantizeLinear": inputs + len(reads),
        "Mul": len(multiplied),
        "MatMul": linears,
        "Conv": len(reads) - linears,
    }


@torch.no_grad()
def test_each_layer_computes_what_the_simulation_does(layers, calibrated, assignment, unet_inputs):
    path, reads = layers
    part, seen = calibrated.part(), {}
    unet = simulate(part.unet, assignment)
    hooks = [
        unet.get_submodule(name).register_forward_pre_hook(
            lambda layer, inputs, name=name: seen.__setitem__(name, inputs[0].half())
        )
        for name in reads
    ]
    part(**unet_inputs(2, seed=3))
    for hook in hooks:
        hook.remove()
    outputs = load(path, threads=1)(**{name: seen[name] for name in reads.values()})
    errors = {}
    for name in reads:
        layer = unet.get_submodule(name)
        bias = layer.bias if layer.bias is not None and assignment[name].role != "conv" else 0  # MatMul comes before it
        errors[name] = relative_error(layer(seen[name].float()) - bias, outputs[f"{name}.output"].float())
    assert max(errors.values()) < TOLERANCE, max(errors, key=errors.get)
