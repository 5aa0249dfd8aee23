"""Which engine a part becomes, and which are opened to measure their memory: each alone, and none twice."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sd_quant.engines.pool import Pool, Variant
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ResourceError
from sd_quant.metrics.memory import MemoryTaken
from sd_quant.stages import open_parts, verify
from tests.presets import job

pytestmark = pytest.mark.commit


def infer(
    engine: str = "torch_native", precision: str = "auto", cuda_graph: bool = False, vae_tile: int | None = None
) -> SimpleNamespace:
    return SimpleNamespace(engine=engine, precision=precision, cuda_graph=cuda_graph, vae_tile=vae_tile)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")
def test_graphs_of_cuda_need_a_gpu():
    open_parts.check_cuda_graph(infer())
    with pytest.raises(ResourceError, match="infer.cuda_graph=true takes an NVIDIA GPU and this machine has none"):
        open_parts.check_cuda_graph(infer(cuda_graph=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the precisions of a processor")
@pytest.mark.parametrize("part, precision, expected", [
    ("clip1", "auto", torch.float32), ("clip1", "bf16", torch.bfloat16), ("vae", "bf16", torch.float32)
])  # fmt: skip
def test_torch_computes_in_the_precision_that_was_asked_for(checkpoint, part, precision, expected):
    engine = open_parts.open_torch(checkpoint, infer(precision=precision), part)
    assert isinstance(engine, TorchEngine)
    assert {weight.dtype for weight in engine.module.parameters()} == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("name, compiles", [("torch", False), ("torch_native", False), ("torch_compiled", True)])
def test_only_the_compiled_engine_compiles(checkpoint, monkeypatch, name, compiles):
    compiled = []
    monkeypatch.setattr(open_parts, "compiled", compiled.append)
    engine = open_parts.open_torch_engine(checkpoint, infer(name), "clip1")
    assert compiled == ([engine.module] if compiles else [])
    open_parts.open_torch(checkpoint, infer(name), "clip1")
    assert len(compiled) == compiles  # the framework is eager beside whatever engine


def test_a_replayed_engine_is_the_same_engine(checkpoint):
    engine = open_parts.open_torch_engine(checkpoint, infer(cuda_graph=True), "clip1")
    assert isinstance(engine, Replayed)
    assert open_parts.module_of(engine) is engine.engine.module
    assert open_parts.module_of(engine.engine) is engine.engine.module


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


INFER = job("infer.width=64", "infer.height=64").infer
OPENED = ("unet_xl", "clip1", "vae")


def measured(monkeypatch, simulated: str | None = None, **beside: str):
    """The record's entry, and the keys that were opened in their order, with how many engines were open then."""
    opened = []

    def open_engine(key):
        opened.append((key, len(pool.engines)))
        return SimpleNamespace(inputs={"x": torch.float32}, device=torch.device("cpu"), close=lambda: None)

    def taken(opened, on_gpu, restart):
        opened()
        return MemoryTaken(1, 3, 2)

    pool = Pool(open_engine)
    full = {part: f"full {part}" for part in OPENED}
    quantized = Variant(pool, full | {"clip1": "int8 clip1"} | beside)
    contract = SimpleNamespace(shapes_for=lambda *size: {"x": (1,)}, dtypes={"x": torch.float32})
    monkeypatch.setattr(verify, "contracts_of", lambda checkpoint: dict.fromkeys(OPENED, contract))
    monkeypatch.setattr(verify, "samples_per_call", lambda *call: 1)
    monkeypatch.setattr(verify, "memory_taken", taken)
    variants = SimpleNamespace(
        loaded=SimpleNamespace(checkpoint=None, denoisers=["unet_xl"], infer=INFER), engine=INFER.engine,
        assignments={"unet_xl": {}, "clip1": {}},
        engines={"full_precision": Variant(pool, full), "quantized": quantized}, pool=pool, simulated=simulated,
        together=True,
    )  # fmt: skip
    pool["left open"]
    found = verify.memory_of_parts(variants, lambda: None)
    assert not pool.engines
    return found, opened[1:]


def test_each_engine_is_opened_alone(monkeypatch):
    found, opened = measured(monkeypatch)
    assert {part: list(both) for part, both in found.items()} == {
        "unet_xl": ["full_precision", "quantized"], "clip1": ["full_precision", "quantized"], "vae": ["full_precision"],
    }  # fmt: skip
    assert found["clip1"]["quantized"] == MemoryTaken(1, 3, 2)._asdict() | {"device": "cpu"}
    assert opened == [(f"full {OPENED[0]}", 0)] * 2 + [("full clip1", 0), ("int8 clip1", 0), ("full vae", 0)]


def test_a_simulated_denoiser_is_no_engine_and_precise_steps_have_one_beside_it(monkeypatch):
    found, opened = measured(monkeypatch, simulated="no kernels")
    assert found["unet_xl"]["quantized"] == {"reason": "simulated: no kernels"} and len(opened) == 4
    _, opened = measured(monkeypatch, **{"unet_xl/h": "weights alone"})
    assert opened[1:3] == [("full unet_xl", 0), ("weights alone", 1)]
