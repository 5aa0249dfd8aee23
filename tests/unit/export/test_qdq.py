"""What was written, read back by onnx and by ONNX Runtime, which takes a graph as it is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

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
from sd_quant.quantization.assignment import LayerAssignment, rewritten, weights_alone
from sd_quant.quantization.recipe import Recipe
from tests.graphs import producers, readers, stored_in

from .conftest import inputs

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # the tracing
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
KEPT = (
    f"{BLOCK}.attn1.to_k",  # reads an input that is folded
    f"{BLOCK}.attn2.to_k",  # reads one that is not
    f"{BLOCK}.ff.net.0.proj",  # takes over the smoothing of the linear behind it
    "mid_block.resnets.0.conv1",
)


@pytest.fixture(scope="module")
def assignments(network) -> Mapping[str, dict[str, LayerAssignment]]:
    """By smoothing; in each some linears are quantized and others are not."""
    folded, modelopt = (Recipe(level, 0.8, collect_method="min-max") for level in (3.0, 2.5))
    return {"folded": network.derive(folded, KEPT), "modelopt": network.derive(replace(modelopt, smoothing="modelopt"))}


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {name: numpy_helper.to_array(tensor) for name, tensor in stored_in(path).items()}


@pytest.mark.parametrize("size", [{"batch": 1}, {"batch": 3}, {"batch": 2, "height": 4, "width": 12}], ids=str)
def test_unquantized_it_computes_what_torch_does(full_precision, network, size):
    """Weights and activations of the engine are fp16, torch's fp32; measured 2.5e-3."""
    given = inputs(**size, seed=7)
    found = load(full_precision, threads=1)(**given)["out"].float()
    assert relative_error(network.part()(**given), found) < 1e-2


@pytest.mark.parametrize("smoothing", ["folded", "modelopt"])
def test_exactly_the_assigned_layers_have_codes(assignments, network, smoothing, tmp_path):
    """Folded, an input is quantized once for all its readers, and multiplied only where no module makes it."""
    path = network.write(tmp_path / "unet.onnx", assignment := assignments[smoothing])
    stored = initializers(path)
    int8 = {name.removesuffix(".weight.int8") for name in stored if name.endswith(".weight.int8")}
    assert int8 == {f"unet.{name}" for name, layer in assignment.items() if layer.format}
    roles = {layer.role for layer in assignment.values() if layer.format}
    assert roles == {"conv", "ffn", "qkv"} | ({"linear"} if smoothing == "folded" else set())
    for key, value in network.part().state_dict().items():
        name, _, kind = key.removeprefix("unet.").rpartition(".")
        if kind == "weight" and f"unet.{name}" in int8:
            assert key not in stored and stored[f"{key}.int8"].dtype == np.int8
        else:
            expected = rewritten(value, assignment[name]) if name in assignment else value
            assert np.array_equal(stored[key], expected.half().numpy()), key
    made, shared = producers(path), shared_inputs(assignment)
    linears = {name for name, layer in assignment.items() if layer.format and layer.role != "conv"}
    multiplications = sum(name.endswith(".smoothed") for name in made)
    quantizers = sum(f"{name}.input_quantized" in made for name in linears)
    if smoothing == "modelopt":
        assert multiplications == quantizers == len(linears) == 32  # 4 blocks: 6 qkv, 2 feed-forward
    else:
        assert quantizers == sum(bool(linears & set(each.readers)) for each in shared)
        # in each stack: the text of its block, and proj_out
        assert multiplications == sum(each.producer is None for each in shared) == 8


def test_readers_of_one_tensor_with_other_ranges_read_other_copies(network, assignments, tmp_path):
    """As where an observer gives each the range of its own sample."""
    attention = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    query, key = (assignments["folded"][f"{attention}.to_{letter}"] for letter in "qk")
    wider = replace(key, activation_amax=2 * key.activation_amax)
    path = network.write(tmp_path / "unet.onnx", {**assignments["folded"], key.name: wider})
    stored, made, reading = initializers(path), producers(path), readers(path)
    for layer in (query, wider):
        [reader] = reading[f"unet.{layer.name}.weight.dequantized"]
        assert stored[made[reader.input[0]].input[1]] == layer.activation_scale


def assert_same(path: Path, other: Path) -> None:
    found, expected = initializers(path), initializers(other)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def test_a_graph_of_unquantized_inputs_reads_the_weights_of_the_recipes_own(
    network, assignments, tmp_path, monkeypatch
):
    """All but what differs: biases of shifted convolutions, and what is in one file is in each."""
    precise = weights_alone(assignments["folded"])
    alone = network.write(tmp_path / "alone" / "unet.onnx", precise)
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 100_000)
    own = network.write(tmp_path / "unet.onnx", assignments["folded"])
    shared = network.write(tmp_path / "precise.onnx", precise)
    onnx_file.share_weights(shared, own)
    assert onnx_files(shared) == [shared, own.with_name("unet.onnx.data")]
    assert shared.stat().st_size < alone.stat().st_size / 4
    assert_same(shared, alone)
    onnx.checker.check_model(shared, full_check=True)
    one, other = (load(path, threads=1)(**inputs(2)) for path in (alone, shared))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "files", [["unet.onnx"], ["unet.onnx", "unet.onnx.data"]], ids=["one file", "weights beside it"]
)
def test_a_file_is_written_whole_or_not_at_all_and_moves(network, assignments, tmp_path, monkeypatch, files):
    """Every model is too large for one file in the second case. What was there stays until another is whole."""
    if len(files) == 2:
        monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    weights, folder = network.part().state_dict(), tmp_path / "written"
    path = folder / "unet.onnx"

    def read_until_the_disk_breaks(name: str) -> torch.Tensor:
        if name.startswith("unet.up_blocks"):
            raise OSError("input/output error")
        return torch.zeros_like(weights[name])

    def contents() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    folder.mkdir()
    stray = replace(assignments["modelopt"]["mid_block.resnets.0.conv1"], name="mid_block.resnets.7.conv1")
    with pytest.raises(ArtifactError, match="no layer mid_block.resnets.7.conv1"):
        network.write(path, {**assignments["modelopt"], stray.name: stray})
    broken = pytest.raises((OSError, ir.serde.SerdeError))  # onnx_ir wraps what a reader raises while it serializes
    with broken:
        network.write(path, {}, read=read_until_the_disk_breaks)
    assert contents() == {}
    network.write(path, {}, read=lambda name: torch.zeros_like(weights[name]))
    before = contents()
    assert sorted(before) == files
    with broken:
        network.write(path, {}, read=read_until_the_disk_breaks)
    assert contents() == before
    network.write(path, assignments["folded"])
    moved = folder.rename(tmp_path / "moved") / "unet.onnx"  # the graph names its data file, no folder
    assert [file.name for file in onnx_files(moved)] == sorted(file.name for file in moved.parent.iterdir()) == files
    onnx.checker.check_model(moved, full_check=True)
    assert_same(moved, network.write(tmp_path / "again.onnx", assignments["folded"]))
    load(moved, threads=1)
