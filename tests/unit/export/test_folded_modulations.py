"""A tiny Stable Diffusion 3 whose modulations have absorbed the smoothing, read back by onnx and by ONNX Runtime."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from sd_quant.engines.onnxruntime import load
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of, trace
from sd_quant.models import sd3
from sd_quant.models.parts import Part, axes
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import simulate

from ...modulated import assigned, made, sd35_network

pytestmark = pytest.mark.slow  # the tracing
PREFIX = "transformer."
RECIPE = Recipe(3.0, 0.8, collect_method="min-max", per_channel=True)


@dataclass(frozen=True)
class Traced:
    part: Part
    network: nn.Module
    graph: ir.Model
    inputs: dict[str, Tensor]

    def write(self, path: Path, assignment: Mapping[str, LayerAssignment]) -> Path:
        weights = self.network.state_dict(prefix=PREFIX)
        inputs = len(self.part.contract.inputs)
        write_onnx(
            copy_of(self.graph), path, inputs=inputs, prefix=PREFIX, read=weights.__getitem__, assignment=assignment
        )
        return path

    def error(self, found: Tensor) -> float:
        """Of an output, relative to that of the network as it is."""
        return relative_error(self.part.wrap(self.network)(**self.inputs), found.float())

    def error_of(self, path: Path) -> float:
        return self.error(load(path, threads=1)(**self.inputs)["out_sample"])


@pytest.fixture(scope="module")
def traced() -> Traced:
    """With the second attention of Stable Diffusion 3.5 in its first block."""
    network = made("sd35")
    part = sd3.parts({"transformer": network.config, "vae": {"latent_channels": 4}}, 16, "diffusers")["transformer"]
    random = torch.Generator().manual_seed(1)
    inputs = {
        name: torch.randn(shape, generator=random) if len(shape) > 1 else torch.full(shape, 500.0)
        for name, shape in part.contract.shapes(**axes(batch=2, width=64, height=64)).items()
    }
    return Traced(part, network, trace(lambda: part.wrap(sd35_network()), part.contract), inputs)


@pytest.fixture(scope="module")
def assignment(traced) -> Mapping[str, LayerAssignment]:
    return assigned("sd35", traced.network, RECIPE)


@pytest.fixture(scope="module")
def written(traced, assignment, tmp_path_factory) -> Path:
    return traced.write(tmp_path_factory.mktemp("folded") / "transformer.onnx", assignment)


def smoothed_layers(path: Path) -> set[str]:
    """For whose inputs the graph multiplies."""
    outputs = (name for node in onnx.load(path).graph.node if node.op_type == "Mul" for name in node.output)
    return {name.removesuffix(".smoothed") for name in outputs if name.endswith(".smoothed")}


def test_nothing_multiplies_in_front_of_attention_and_feed_forward(traced, written, assignment, tmp_path):
    onnx.checker.check_model(written, full_check=True)
    ends = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "net.0.proj")
    assert not [name for name in smoothed_layers(written) if name.endswith(ends)]
    assert len([name for name in assignment if name.endswith(ends)]) == 18 and smoothed_layers(written)
    unfolded = assigned("sd35", traced.network, RECIPE, bias_of=lambda name: None)
    multiplied = smoothed_layers(traced.write(tmp_path / "transformer.onnx", unfolded))
    assert (
        len([name for name in multiplied if name.endswith(ends)]) == 8
    )  # inputs: 3 + 2 of attentions, 3 of the others


def test_a_modulations_bias_is_stored_as_it_was_rewritten(traced, written, assignment):
    stored = {tensor.name: tensor for tensor in onnx.load(written).graph.initializer}
    modulations = [layer for layer in assignment.values() if layer.output_shift is not None]
    assert len(modulations) == 4 and all(layer.format for layer in modulations)
    for layer in modulations:
        bias = traced.network.get_submodule(layer.name).bias
        found = torch.tensor(numpy_helper.to_array(stored[f"{PREFIX}{layer.name}.bias"]))
        assert torch.equal(found, rewritten(bias, layer).half()) and not torch.equal(found, bias.half())


@torch.no_grad()
def test_folding_alone_changes_nothing(traced, assignment, tmp_path):
    """Weights are fp16 numbers in both; measured 1e-3."""
    folding = {
        name: replace(
            layer, format=None, activation_format=None,
            pre_quant_scale=None if layer.multiplies else layer.pre_quant_scale,
        ) for name, layer in assignment.items()
    }  # fmt: skip
    assert traced.error_of(traced.write(tmp_path / "full.onnx", {})) < 5e-3
    assert traced.error_of(traced.write(tmp_path / "folded.onnx", folding)) < 5e-3


@torch.no_grad()
def test_quantized_it_is_as_far_from_full_precision_as_the_simulation(traced, written, assignment):
    simulated = simulate(copy.deepcopy(traced.network), assignment)
    expected = traced.error(traced.part.wrap(simulated)(**traced.inputs))
    assert traced.error_of(written) == pytest.approx(expected, rel=0.2)
    assert 5e-3 < expected < 0.2
