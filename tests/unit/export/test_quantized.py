"""What was written, read back by onnx and by ONNX Runtime, which takes a graph as it is."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from sd_quant.engines.base import onnx_files
from sd_quant.engines.onnxruntime import load
from sd_quant.errors import ArtifactError
from sd_quant.export import quantized as export
from sd_quant.metrics.fidelity import relative_error
from sd_quant.quantization.int8 import quantize_weight
from sd_quant.quantization.simulate import simulate


def initializers(path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.fixture(scope="module")
def full_engine(full_precision):
    return load(full_precision, threads=1)


@pytest.mark.parametrize("written", ["full_precision", "quantized"])
def test_the_file_is_valid_onnx(request, written):
    path = request.getfixturevalue(written)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    assert [value.name for value in model.graph.input] == ["x", "timesteps", "context", "y"]
    assert [value.name for value in model.graph.output] == ["out"]
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("batch", [1, 3])
def test_unquantized_it_computes_what_torch_does(full_engine, calibrated, unet_inputs, batch):
    """Weights and activations of the engine are fp16, torch's fp32; measured 2.5e-3."""
    inputs = unet_inputs(batch, seed=7)
    error = relative_error(calibrated.part()(**inputs), full_engine(**inputs)["out"].float())
    assert error < 1e-2


def test_height_and_width_are_dynamic(full_engine, calibrated, unet_inputs):
    inputs = unet_inputs(2, seed=8) | {"x": torch.randn(2, 4, 4, 12, generator=torch.Generator().manual_seed(0))}
    error = relative_error(calibrated.part()(**inputs), full_engine(**inputs)["out"].float())
    assert error < 1e-2


@pytest.mark.parametrize("batch", [1, 3])
def test_quantized_it_is_as_far_from_full_precision_as_the_simulation(
    quantized, calibrated, assignment, unet_inputs, batch
):
    """Not the same: what rounds the other way in one layer changes all behind it. By layer see test_layer_cut.py."""
    inputs, simulated = unet_inputs(batch, seed=7), calibrated.part()
    simulate(simulated.unet, assignment)
    expected = calibrated.part()(**inputs)
    ours = relative_error(expected, load(quantized, threads=1)(**inputs)["out"].float())
    assert ours == pytest.approx(relative_error(expected, simulated(**inputs)), rel=0.2)
    assert 1e-2 < ours < 0.3


def test_int8_weights_for_exactly_the_assigned_layers(quantized, assignment):
    stored = initializers(quantized)
    int8 = {name.removesuffix(".weight.int8") for name in stored if name.endswith(".weight.int8")}
    assert int8 == {f"unet.{name}" for name, layer in assignment.items() if layer.format}
    assert {layer.role for layer in assignment.values() if layer.format} == {"conv", "ffn", "qkv"}
    assert not [name for name in int8 if f"{name}.weight" in stored]  # nor is the float weight still there
    assert {array.dtype for name, array in stored.items() if name.endswith((".int8", "zero_point"))} == {
        np.dtype("int8")
    }


def test_what_is_stored_of_a_layer(quantized, assignment, weights):
    stored = initializers(quantized)
    for name, layer in assignment.items():
        weight = weights[f"unet.{name}.weight"]
        if layer.format is None:
            kept = stored[f"unet.{name}.weight"]
            assert kept.dtype == np.float16 and np.array_equal(kept, weight.half().numpy())
            continue
        expected = quantize_weight(weight, layer.weight_scale, layer.pre_quant_scale)
        linear = layer.role != "conv"
        assert np.array_equal(stored[f"unet.{name}.weight.int8"], (expected.T if linear else expected).numpy())
        scales = {
            f"unet.{name}.weight.scale": layer.weight_scale.numpy(),
            f"{name}.input_scale": np.float32(layer.activation_scale),
        }
        if linear:
            scales[f"{name}.pre_quant_scale"] = layer.pre_quant_scale.numpy()
        for key, expected_scale in scales.items():
            assert stored[key].dtype == np.float16
            assert np.array_equal(stored[key].astype(np.float32), expected_scale), key


def test_each_layer_has_its_pair_before_the_one_node_that_multiplies(quantized, assignment):
    model = onnx.load(quantized)
    makers = {output: node for node in model.graph.node for output in node.output}
    multiplying = [node for node in model.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")]
    found = {}
    for node in multiplying:
        operands = [makers.get(name) for name in node.input[:2]]
        if all(maker is not None and maker.op_type == "DequantizeLinear" for maker in operands):
            name = operands[0].name.removesuffix(".input_dequantized")
            found[name] = (node.op_type, next(a.i for a in operands[1].attribute if a.name == "axis"))
            assert operands[1].name == f"unet.{name}.weight.dequantized"
            assert makers[operands[0].input[0]].op_type == "QuantizeLinear"
    kinds = {"conv": ("Conv", 0), "ffn": ("MatMul", 1), "qkv": ("MatMul", 1)}
    assert found == {name: kinds[layer.role] for name, layer in assignment.items() if layer.format}


def test_int8_is_smaller(full_precision, quantized):
    assert quantized.stat().st_size < 0.75 * full_precision.stat().st_size


def test_a_layer_that_the_graph_does_not_have_is_refused(write, assignment, tmp_path):
    stray = dataclasses.replace(assignment["mid_block.resnets.0.conv1"], name="mid_block.resnets.7.conv1")
    with pytest.raises(ArtifactError, match="no layer mid_block.resnets.7.conv1"):
        write(tmp_path / "unet.onnx", assignment={**assignment, stray.name: stray})
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["one file", "weights beside it"])
def storage(request, monkeypatch) -> tuple[str, ...]:
    """Names of the files; every model is too large for one in the second case."""
    if request.param == "one file":
        return ("unet.onnx",)
    monkeypatch.setattr(export, "LARGEST_SINGLE_FILE", 0)
    return ("unet.onnx", "unet.onnx.data")


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_graph_and_its_data_file(write, assignment, quantized, unet_inputs, tmp_path, storage):
    path = write(tmp_path / "written" / "unet.onnx", assignment=assignment)
    assert sorted(contents(path.parent)) == list(storage)
    moved = path.parent.rename(tmp_path / "moved") / "unet.onnx"  # the graph names its data file, no folder
    assert [file.name for file in onnx_files(moved)] == list(storage)
    onnx.checker.check_model(moved, full_check=True)
    inputs = unet_inputs(1, seed=9)
    assert torch.equal(load(moved, threads=1)(**inputs)["out"], load(quantized, threads=1)(**inputs)["out"])
    assert initializers(moved).keys() == initializers(quantized).keys()


def test_a_failure_leaves_what_was_there(write, weights, tmp_path, storage):
    def read_until_the_disk_breaks(name: str) -> torch.Tensor:
        if name.startswith("unet.up_blocks"):
            raise OSError("input/output error")
        return torch.zeros_like(weights[name])

    path = tmp_path / "unet.onnx"
    with pytest.raises((OSError, ir.serde.SerdeError)):  # onnx_ir wraps what a reader raises while it serializes
        write(path, read=read_until_the_disk_breaks)
    assert contents(tmp_path) == {}
    write(path)
    before = contents(tmp_path)
    assert sorted(before) == list(storage)
    with pytest.raises((OSError, ir.serde.SerdeError)):
        write(path, read=read_until_the_disk_breaks)
    assert contents(tmp_path) == before


def test_writing_again_replaces_both_files(write, assignment, weights, tmp_path, storage):
    path = write(tmp_path / "unet.onnx", read=lambda name: torch.zeros_like(weights[name]))
    write(path)
    assert sorted(contents(tmp_path)) == list(storage)
    stored = initializers(path)
    assert np.array_equal(stored["unet.conv_in.weight"], weights["unet.conv_in.weight"].half().numpy())
