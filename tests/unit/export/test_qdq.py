"""What was written, read back by onnx and by ONNX Runtime, which takes a graph as it is."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.onnxruntime import load
from sd_quant.errors import ArtifactError
from sd_quant.export import onnx_file
from sd_quant.models.unet import shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.formats.int8 import per_channel, quantize
from sd_quant.simulation.modelopt import simulate

pytestmark = pytest.mark.slow  # the tracing


def initializers(path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.fixture(scope="module")
def full_engine(full_precision):
    return load(full_precision, threads=1)


@pytest.mark.parametrize("which", ["full precision", "folded", "modelopt"])
def test_the_file_is_valid_onnx(full_precision, written, which):
    path = full_precision if which == "full precision" else written[which]
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


@pytest.fixture(scope="module")
def simulated(calibrated, assignment):
    part = calibrated.part()
    simulate(part.unet, assignment)
    return part


@pytest.fixture(scope="module")
def quantized_engine(quantized):
    return load(quantized, threads=1)


@pytest.mark.parametrize("batch", [1, 3])
def test_quantized_it_is_as_far_from_full_precision_as_the_simulation(
    quantized_engine, simulated, calibrated, unet_inputs, batch
):
    """Not the same: what rounds the other way in one layer changes all behind it. By layer see test_layer_cut.py."""
    inputs = unet_inputs(batch, seed=7)
    expected = calibrated.part()(**inputs)
    ours = relative_error(expected, quantized_engine(**inputs)["out"].float())
    assert ours == pytest.approx(relative_error(expected, simulated(**inputs)), rel=0.2)
    assert 1e-2 < ours < 0.3


def test_folding_alone_changes_nothing(full_engine, full_precision, write, assignments, unet_inputs, tmp_path):
    """The graph with other norms and weights, none of them INT8; what is multiplied in the graph is left out.

    fp16 rounds other numbers, as it does when torch computes the unquantized graph; measured 1.6e-3.
    """
    folding = {
        name: dataclasses.replace(
            layer,
            format=None,
            activation_format=None,
            pre_quant_scale=None if layer.multiplies else layer.pre_quant_scale,
        )
        for name, layer in assignments["folded"].items()
    }
    path, inputs = write(tmp_path / "unet.onnx", assignment=folding), unet_inputs(2, seed=7)
    before, after = initializers(full_precision), initializers(path)
    assert before.keys() == after.keys()
    assert sum(not np.array_equal(before[name], after[name]) for name in before) > 50
    assert relative_error(full_engine(**inputs)["out"].float(), load(path, threads=1)(**inputs)["out"].float()) < 1e-2


def test_int8_weights_for_exactly_the_assigned_layers(quantized, assignment, smoothing):
    stored = initializers(quantized)
    int8 = {name.removesuffix(".weight.int8") for name in stored if name.endswith(".weight.int8")}
    assert int8 == {f"unet.{name}" for name, layer in assignment.items() if layer.format}
    roles = {layer.role for layer in assignment.values() if layer.format}
    assert roles == {"conv", "ffn", "qkv"} | ({"linear"} if smoothing == "folded" else set())
    assert not [name for name in int8 if f"{name}.weight" in stored]  # nor is the float weight still there
    assert {array.dtype for name, array in stored.items() if name.endswith((".int8", "zero_point"))} == {
        np.dtype("int8")
    }


def test_what_is_stored_of_every_parameter(quantized, assignment, weights):
    """The checkpoint's, as INT8 or fp16, with smoothing in it where the assignment says so."""
    stored = initializers(quantized)
    for key, value in weights.items():
        name, _, kind = key.removeprefix("unet.").rpartition(".")
        layer = assignment.get(name)
        expected = value if layer is None else rewritten(value, layer)
        if kind == "weight" and layer is not None and layer.format:
            expected = quantize(expected, per_channel(layer.weight_scale, expected))
            found = stored[f"{key}.int8"] if layer.role == "conv" else stored[f"{key}.int8"].T
        else:
            expected, found = expected.half(), stored[key]
        assert found.dtype == expected.numpy().dtype and np.array_equal(found, expected.numpy()), key


def test_what_takes_over_a_smoothing_is_stored_with_the_factor(write, assignments, weights, tmp_path):
    """Gain and bias of norms, weight and bias of a linear that stays in high precision: of ones, the factor is left."""
    assignment = assignments["folded"]
    path = write(tmp_path / "unet.onnx", assignment=assignment, read=lambda name: torch.ones_like(weights[name]))
    stored = initializers(path)
    kept = [layer for layer in assignment.values() if layer.output_scale is not None and not layer.format]
    norms = [layer for layer in kept if layer.role == "norm"]
    # In each of 4 stacks of one block: those of proj_in, self-attention, cross-attention and feed-forward, whose reader
    # is kept in one.
    assert len(norms) == 4 * 4 - 1 and len(kept) == len(norms) + 1
    for layer in kept:
        factor = layer.output_scale.half().numpy()
        assert factor.max() > 1.5 * factor.min()
        for kind in ("weight", "bias"):
            parameter = stored[f"unet.{layer.name}.{kind}"]
            assert np.array_equal(parameter.reshape(len(factor), -1).max(axis=1), factor), layer.name
            assert np.array_equal(parameter.reshape(len(factor), -1).min(axis=1), factor), layer.name


def test_scales(quantized, assignment):
    stored = initializers(quantized)
    for name, layer in assignment.items():
        if layer.format is None:
            assert f"unet.{name}.weight.scale" not in stored
            continue
        scale = stored[f"unet.{name}.weight.scale"]
        assert scale.dtype == np.float16 and np.array_equal(scale.astype(np.float32), layer.weight_scale.numpy())


@dataclasses.dataclass
class Found:
    """Of the node that multiplies with a quantized weight: what it is, and what its input comes from."""

    op_type: str
    axis: int
    quantize: onnx.NodeProto
    multiply: onnx.NodeProto | None


@pytest.fixture(scope="module")
def found(quantized) -> dict[str, Found]:
    """By layer."""
    model = onnx.load(quantized)
    makers = {output: node for node in model.graph.node for output in node.output}
    layers = {}
    for node in model.graph.node:
        operands = [makers.get(name) for name in node.input[:2]]
        if node.op_type not in ("Conv", "MatMul", "Gemm") or not all(
            maker is not None and maker.op_type == "DequantizeLinear" for maker in operands
        ):
            continue
        activation, weight = operands
        quantize = makers[activation.input[0]]
        assert quantize.op_type == "QuantizeLinear" and quantize.input[1:] == activation.input[1:]  # scale, zero point
        multiply = makers.get(quantize.input[0])
        multiply = multiply if multiply is not None and multiply.output[0].endswith(".smoothed") else None
        axis = next(attribute.i for attribute in weight.attribute if attribute.name == "axis")
        name = weight.name.removeprefix("unet.").removesuffix(".weight.dequantized")
        layers[name] = Found(node.op_type, axis, quantize, multiply)
    return layers


def test_each_layer_has_its_pair_before_the_one_node_that_multiplies(found, assignment):
    kinds = {"conv": ("Conv", 0), "ffn": ("MatMul", 1), "qkv": ("MatMul", 1), "linear": ("MatMul", 1)}
    expected = {name: kinds[layer.role] for name, layer in assignment.items() if layer.format}
    assert {name: (layer.op_type, layer.axis) for name, layer in found.items()} == expected


def test_each_input_is_multiplied_and_quantized_with_its_own_numbers(found, assignment, quantized):
    stored = initializers(quantized)
    for name, nodes in found.items():
        layer, scale = assignment[name], stored[nodes.quantize.input[1]]
        assert scale.dtype == np.float16 and scale == layer.activation_scale
        assert (nodes.multiply is not None) == layer.multiplies
        if layer.multiplies:
            vector = stored[nodes.multiply.input[1]]
            assert vector.dtype == np.float16 and np.array_equal(vector, layer.pre_quant_scale.half().numpy())


def test_readers_of_one_tensor_with_other_ranges_read_other_copies(write, assignments, tmp_path):
    """As where an observer gives each the range of its own sample."""
    attention = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    query, key = (assignments["folded"][f"{attention}.to_{letter}"] for letter in "qk")
    wider = dataclasses.replace(key, activation_amax=2 * key.activation_amax)
    path = write(tmp_path / "unet.onnx", assignment={**assignments["folded"], key.name: wider})
    stored, nodes = initializers(path), onnx.load(path).graph.node
    makers = {node.output[0]: node for node in nodes}
    for layer in (query, wider):
        [reader] = [node for node in nodes if f"unet.{layer.name}.weight.dequantized" in node.input]
        assert stored[makers[reader.input[0]].input[1]] == layer.activation_scale


def nodes_of(path, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(path).graph.node if node.op_type == op_type]


def test_what_smoothing_costs_in_the_graph(quantized, found, assignment, smoothing):
    """Folded, an input is quantized once for all its readers, and multiplied only where no module makes it."""
    multiplications = [node for node in nodes_of(quantized, "Mul") if node.output[0].endswith(".smoothed")]
    convolutions = sum(assignment[name].role == "conv" for name in found)
    quantizers = len(nodes_of(quantized, "QuantizeLinear")) - convolutions
    if smoothing == "modelopt":
        assert len(multiplications) == quantizers == len(found) - convolutions == 32  # 4 blocks: 6 qkv, 2 feed-forward
        return
    inputs = [[name for name in shared.readers if name in found] for shared in shared_inputs(assignment)]
    assert all(len({found[name].quantize.name for name in readers}) <= 1 for readers in inputs)
    assert quantizers == sum(bool(readers) for readers in inputs)
    without = [shared for shared in shared_inputs(assignment) if shared.producer is None]
    assert len(multiplications) == len(without) == 8  # in each stack: the text of its block, and proj_out
    attention = [f"down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_{letter}" for letter in "qkv"]
    assert len({found[name].quantize.name for name in attention}) == 1


def test_int8_is_smaller(full_precision, quantized):
    assert quantized.stat().st_size < 0.75 * full_precision.stat().st_size


def test_a_layer_that_the_graph_does_not_have_is_refused(write, assignments, tmp_path):
    assignment = assignments["modelopt"]
    stray = dataclasses.replace(assignment["mid_block.resnets.0.conv1"], name="mid_block.resnets.7.conv1")
    with pytest.raises(ArtifactError, match="no layer mid_block.resnets.7.conv1"):
        write(tmp_path / "unet.onnx", assignment={**assignment, stray.name: stray})
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["one file", "weights beside it"])
def storage(request, monkeypatch) -> tuple[str, ...]:
    """Names of the files; every model is too large for one in the second case."""
    if request.param == "one file":
        return ("unet.onnx",)
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    return ("unet.onnx", "unet.onnx.data")


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_graph_and_its_data_file(write, assignments, written, unet_inputs, tmp_path, storage):
    path = write(tmp_path / "written" / "unet.onnx", assignment=assignments["folded"])
    assert sorted(contents(path.parent)) == list(storage)
    moved = path.parent.rename(tmp_path / "moved") / "unet.onnx"  # the graph names its data file, no folder
    assert [file.name for file in onnx_files(moved)] == list(storage)
    onnx.checker.check_model(moved, full_check=True)
    inputs = unet_inputs(1, seed=9)
    assert torch.equal(load(moved, threads=1)(**inputs)["out"], load(written["folded"], threads=1)(**inputs)["out"])
    assert initializers(moved).keys() == initializers(written["folded"]).keys()


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


def test_writing_again_replaces_both_files(write, weights, tmp_path, storage):
    path = write(tmp_path / "unet.onnx", read=lambda name: torch.zeros_like(weights[name]))
    write(path)
    assert sorted(contents(tmp_path)) == list(storage)
    stored = initializers(path)
    assert np.array_equal(stored["unet.conv_in.weight"], weights["unet.conv_in.weight"].half().numpy())
