"""Which engine a part becomes in each variant, and which are opened to measure their memory: each alone, none twice."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ResourceError
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages import open_parts, session, variants
from sd_quant.stages.session import Session
from sd_quant.stages.variants import Native, Simulated, keys_of, keys_of_letters
from tests.presets import job

pytestmark = pytest.mark.commit

PARTS = ("unet", "vae")
EXPORTED, REFUSED = (SimpleNamespace(refused=because) for because in (None, "it draws random numbers"))
RUN = Path("run")
GRAPHS = {part: RUN / f"onnx/{part}/{part}.onnx" for part in PARTS}
FULL = {part: RUN / f"full_precision/onnx/{part}/{part}.onnx" for part in PARTS}
PLANS, FULL_PLANS = ({part: folder / f"plan/{part}.plan" for part in PARTS} for folder in (RUN, RUN / "full_precision"))
NATIVE, CODES = ({part: Native(part, quantized=quantized) for part in PARTS} for quantized in (False, True))
SIMULATED, BY_TORCH = {"unet": Simulated("unet")}, {"vae": "vae"}
INFER = job("infer.width=64", "infer.height=64").infer
OPENED = ("unet_xl", "clip1", "vae")


class Opened(Session):
    parts, parameters, denoiser = dict.fromkeys(PARTS, EXPORTED), {"unet": 10**9, "vae": 10**8}, "unet"
    denoisers, infer = ["unet"], job().infer


@pytest.mark.parametrize(("engine", "exported", "assigned", "simulated", "full_precision", "quantized"), [
    ("openvino", PARTS, ["unet"], False, GRAPHS | {"unet": FULL["unet"]}, GRAPHS),
    ("tensorrt", PARTS, ["unet"], False, PLANS | {"unet": FULL_PLANS["unet"]}, PLANS),
    ("openvino", PARTS, ["unet"], True, GRAPHS | {"unet": FULL["unet"]}, GRAPHS | SIMULATED),
    ("openvino", PARTS, PARTS, True, FULL, GRAPHS | SIMULATED),  # another part has an unquantized twin too
    ("openvino", ["unet"], ["unet"], False, FULL | BY_TORCH, GRAPHS | BY_TORCH),
    ("openvino", ["vae"], ["unet"], True, GRAPHS | {"unet": "unet"}, GRAPHS | SIMULATED),
    ("torch_native", PARTS, ["unet"], False, NATIVE, NATIVE | {"unet": CODES["unet"]}),
    ("torch_native", PARTS, PARTS, False, NATIVE, CODES),
])  # fmt: skip
def test_each_variant_has_its_own_files(engine, exported, assigned, simulated, full_precision, quantized):
    """What no engine executes is simulated, and what is not exported computed by torch."""
    parts = {part: EXPORTED if part in exported else REFUSED for part in PARTS}
    loaded = SimpleNamespace(parts=parts, denoisers=["unet"], infer=SimpleNamespace(engine=engine))
    found = keys_of(loaded, assigned, RUN, simulated)
    assert found == {
        "framework": {part: part for part in PARTS}, "full_precision": full_precision, "quantized": quantized
    }  # fmt: skip
    loaded.denoisers = PARTS  # all of which are simulated where one has no engine
    assert not simulated or keys_of(loaded, assigned, RUN, True)["quantized"] == {
        each: Simulated(each) for each in PARTS
    }


def test_the_compiled_framework_is_opened_where_it_is_asked_for_and_counts_for_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(session, "fits", lambda memory, what, gpu: asked.append((memory, gpu)) or True)
    monkeypatch.setattr(open_parts, "open_torch_engine", lambda checkpoint, infer, part, assignment: ("as it is", part))
    monkeypatch.setattr(open_parts, "open_compiled", lambda checkpoint, infer, part: ("compiled", part))
    shared = SimpleNamespace(directory=RUN)
    with_it, without = (variants.variants_of(Opened(None), {}, shared, None, baseline) for baseline in (True, False))
    assert "compiled_framework" not in without.engines and with_it.engines["compiled_framework"].keys() == {"unet"}
    assert with_it.engines["compiled_framework"]["unet"] == ("compiled", "unet")
    (memory, gpu), (memory_without, gpu_without) = asked
    assert sum(memory.values()) - sum(memory_without.values()) == 4e9  # fp32
    assert sum(gpu.values()) - sum(gpu_without.values()) == 2e9  # fp16


@pytest.mark.parametrize(("own", "precise"), [
    (GRAPHS["unet"], RUN / "onnx/unet/unet_weights_alone.onnx"),
    (PLANS["unet"], RUN / "plan/unet_weights_alone.plan"),
    (Native("unet", True), Native("unet", True, weights_alone=True)),
    (Simulated("unet"), Simulated("unet", weights_alone=True)), ("unet", "unet"),
])  # fmt: skip
def test_precise_steps_have_the_recipes_weights_or_the_unquantized_engine(own, precise):
    assert keys_of_letters("unet", own, FULL["unet"], {"f", "h"}) == {"unet/h": precise, "unet/f": FULL["unet"]}
    assert keys_of_letters("unet", own, FULL["unet"], ()) == {}


def test_torch_quantizes_no_inputs_in_a_precise_step(monkeypatch):
    layer = LayerAssignment("layer", "ffn", (2, 4), "int8", "int8")
    monkeypatch.setattr(open_parts, "open_simulated", lambda checkpoint, assignment, part: assignment["layer"])
    monkeypatch.setattr(open_parts, "open_torch_engine", lambda *given: given[-1]["layer"])
    for kind in (Simulated("unet"), Native("unet", True)):
        keys = kind, replace(kind, weights_alone=True)
        opened = [variants.open_engine(None, None, {"unet": {"layer": layer}}, key) for key in keys]
        assert opened == [layer, replace(layer, activation_format=None)]


def infer(
    engine: str = "torch_native", precision: str = "auto", cuda_graph: bool = False, vae_tile: int | None = None
) -> SimpleNamespace:
    return SimpleNamespace(engine=engine, precision=precision, cuda_graph=cuda_graph, vae_tile=vae_tile)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU does")
@pytest.mark.parametrize("part, precision, expected", [
    ("clip1", "auto", torch.float32), ("clip1", "bf16", torch.bfloat16), ("vae", "bf16", torch.float32)
])  # fmt: skip
def test_torch_computes_in_the_precision_asked_for_and_cuda_graphs_need_a_gpu(checkpoint, part, precision, expected):
    engine = open_parts.open_torch(checkpoint, infer(precision=precision), part)
    assert isinstance(engine, TorchEngine)
    assert {weight.dtype for weight in engine.module.parameters()} == {expected}
    open_parts.check_cuda_graph(infer())
    with pytest.raises(ResourceError, match="infer.cuda_graph=true takes an NVIDIA GPU and this machine has none"):
        open_parts.check_cuda_graph(infer(cuda_graph=True))


@pytest.mark.slow
@pytest.mark.parametrize("name, compiles", [("torch", False), ("torch_native", False), ("torch_compiled", True)])
def test_only_the_compiled_engine_compiles_and_a_replayed_one_is_the_same(checkpoint, monkeypatch, name, compiles):
    compiled = []
    monkeypatch.setattr(open_parts, "compiled", compiled.append)
    engine = open_parts.open_torch_engine(checkpoint, infer(name), "clip1")
    assert compiled == ([engine.module] if compiles else [])
    open_parts.open_torch(checkpoint, infer(name), "clip1")
    assert len(compiled) == compiles  # the framework is eager beside whatever engine
    replayed = open_parts.open_torch_engine(checkpoint, infer(cuda_graph=True), "clip1")
    assert isinstance(replayed, Replayed)
    assert open_parts.module_of(replayed) is open_parts.module_of(replayed.engine) is replayed.engine.module


@pytest.mark.slow
def test_torch_computes_on_the_best_device_in_layers_for_it(checkpoint, monkeypatch):
    """Stood in for by one without memory."""
    monkeypatch.setattr(open_parts, "best_device", lambda: torch.device("meta"))
    asked = []
    monkeypatch.setattr(open_parts, "with_native_layers", lambda network, known, device: asked.append((known, device)))
    for engine in (
        open_parts.open_torch(checkpoint, infer(), "unet_xl", {}),
        open_parts.open_torch_engine(checkpoint, infer(), "clip1"),
        open_parts.open_simulated(checkpoint, {}),
    ):
        assert engine.device.type == "meta"
        assert {weight.device.type for weight in engine.module.parameters()} == {"meta"}
    assert asked == [({}, torch.device("meta"))]


@pytest.mark.parametrize(("part", "knobs", "told"), [
    ("unet_xl", {"engine": "openvino", "precision": "bf16"}, {"precision": "bf16"}),
    ("unet_xl", {"engine": "openvino"}, {}), ("unet_xl", {"engine": "openvino", "precision": "fp16"}, {}),
    ("unet_xl", {"engine": "torch", "precision": "bf16"}, {}),
    ("vae", {"engine": "openvino", "vae_tile": 32}, {"kept": 4}),  # what is compiled for each shape of tiles
    ("unet_xl", {"engine": "openvino", "vae_tile": 32}, {}), ("vae", {"engine": "openvino"}, {}),
    ("vae", {"engine": "onnxruntime", "vae_tile": 32}, {}),
])  # fmt: skip
def test_a_runtime_is_told_of_what_it_has_and_the_part_needs(monkeypatch, part, knobs, told):
    load = Mock()
    monkeypatch.setattr(open_parts, "load_engine", load)
    open_parts.open_file(Path(f"{part}.onnx"), infer(**knobs))
    given = {name: load.call_args.kwargs.get(name) for name in ("precision", "kept")}
    assert given == {"precision": None, "kept": None} | told
