"""Other formats than INT8 in every family: the exported denoiser, layer by layer, against its simulation.

INT8 goes through the command line (tests/cli/test_families.py); here the recipe comes from calls on random inputs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint, open_pipeline
from sd_quant.engines import load_engine, why_not
from sd_quant.export.parts import trace_part, write_part
from sd_quant.export.tracing import copy_of
from sd_quant.inference.loading import LoadedModel, load_model
from sd_quant.inference.parity import layer_outputs, layer_parity, run_simulation
from sd_quant.models.checkpoint import denoiser_of, denoiser_part, denoiser_weights
from sd_quant.models.parts import axes
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import formats_used
from sd_quant.quantization.statistics import LayerStatistics
from sd_quant.simulation.modelopt import simulate
from tests.presets import recipe_of

from ...pipelines import TINY

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]
PRESETS = ("fp8", "svdquant_w4a16", "int4_w4a4", "nvfp4")
FAMILIES = sorted(set(TINY) - {"sd21"})  # whose layers are those of SD 1.5 and SDXL
TOKENS = 16  # that a T5 reads


@dataclass(frozen=True)
class Network:
    checkpoint: DiffusersCheckpoint
    traced: object
    calls: list[dict[str, Tensor]]
    roles: dict[str, str]
    statistics: dict[str, LayerStatistics]

    def loaded(self) -> LoadedModel:
        return load_model(self.checkpoint)


def inputs_of(checkpoint: DiffusersCheckpoint, seed: int) -> dict[str, Tensor]:
    contract = denoiser_part(checkpoint).contract
    random = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=random) for name, shape in contract.shapes(**axes(2, 64, 64)).items()}
    return found | {name: torch.full_like(found[name], 0.5) for name in found if name.startswith("timestep")}


@pytest.fixture(scope="module", params=FAMILIES)
def network(request, tmp_path_factory) -> Network:
    path = tmp_path_factory.mktemp(request.param)
    TINY[request.param](path)
    checkpoint = open_pipeline(path, request.param, TOKENS)
    model, calls = load_model(checkpoint), [inputs_of(checkpoint, seed) for seed in range(2)]
    roles = checkpoint.family.layer_roles(model.denoiser)
    layers = {name: model.denoiser.get_submodule(name) for name, role in roles.items() if role != "excluded"}
    part, now = model.parts[checkpoint.family.DENOISER], {}
    with collect(part, layers, range(2), 1, lambda: (0, [now["call"]]), draw(layers, range(2), 1, seed=0)) as found:
        for now["call"], call in enumerate(calls):
            part(**call)
    return Network(checkpoint, trace_part(checkpoint, checkpoint.family.DENOISER), calls, roles, found.layers)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_exported_layers_compute_what_the_simulation_does(network, preset, tmp_path):
    checkpoint, family, recipe = network.checkpoint, network.checkpoint.family, recipe_of(preset, "quant_level=3")
    alpha = None if recipe.smoothing == "none" else 0.5
    recipe = replace(recipe, alpha=alpha, rank=min(recipe.rank, 8))
    weights, part = denoiser_weights(checkpoint), denoiser_part(checkpoint)
    inputs = family.shared_inputs([name for name, role in network.roles.items() if role != "conv"])
    assignment = derive(network.roles, lambda name: weights[f"{name}.weight"], network.statistics, recipe, inputs)
    path = tmp_path / "onnx" / family.DENOISER / f"{family.DENOISER}.onnx"
    path.parent.mkdir(parents=True)
    write_part(copy_of(network.traced), checkpoint, family.DENOISER, path, assignment)
    onnx.checker.check_model(path, full_check=True)
    stored = {onnx.TensorProto.DataType.Name(weight.data_type) for weight in onnx.load(path).graph.initializer}
    assert stored & {"FLOAT8E4M3FN", "INT8", "INT4", "FLOAT4E2M1"}

    model = network.loaded()
    engine, call = model.torch_engine(family.DENOISER), network.calls[0]
    (full,) = engine(**call).values()
    simulate(denoiser_of(checkpoint, engine.module), assignment)
    simulation = run_simulation(engine, denoiser_of(checkpoint, engine.module), call, assignment)
    assert not torch.equal(full, simulation.output)
    used = formats_used(recipe.enable, recipe.quant_level)
    for name in ("openvino", "onnxruntime"):
        if why_not(name, used) is None:
            outputs = layer_outputs(simulation, assignment, path, part.prefix, name)
            loaded = load_engine(name, path)
            (quantized,) = loaded(**call).values()
            loaded.close()
            parity = layer_parity(simulation, full, quantized, assignment, outputs, family.DENOISER)
            assert parity["quantized_layers"]["count"] == sum(layer.format is not None for layer in assignment.values())
