"""Which engines are opened to measure their memory: each alone, and none twice for the same figure."""

from types import SimpleNamespace

import pytest
import torch

from sd_quant.engines.pool import Pool, Variant
from sd_quant.metrics.memory import MemoryTaken
from sd_quant.stages import part_memory
from tests.presets import job

pytestmark = pytest.mark.commit

INFER = job("infer.width=64", "infer.height=64").infer
PARTS = ("unet_xl", "clip1", "vae")


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
    full = {part: f"full {part}" for part in PARTS}
    quantized = Variant(pool, full | {"clip1": "int8 clip1"} | beside)
    contract = SimpleNamespace(shapes_for=lambda *size: {"x": (1,)}, dtypes={"x": torch.float32})
    monkeypatch.setattr(part_memory, "contracts_of", lambda checkpoint: dict.fromkeys(PARTS, contract))
    monkeypatch.setattr(part_memory, "samples_per_call", lambda *call: 1)
    monkeypatch.setattr(part_memory, "memory_taken", taken)
    variants = SimpleNamespace(
        loaded=SimpleNamespace(checkpoint=None, denoisers=["unet_xl"], infer=INFER), engine=INFER.engine,
        assignments={"unet_xl": {}, "clip1": {}},
        engines={"full_precision": Variant(pool, full), "quantized": quantized}, pool=pool, simulated=simulated,
        together=True,
    )  # fmt: skip
    pool["left open"]
    found = part_memory.memory_of_parts(variants, lambda: None)
    assert not pool.engines
    return found, opened[1:]


def test_each_engine_is_opened_alone(monkeypatch):
    found, opened = measured(monkeypatch)
    assert {part: list(both) for part, both in found.items()} == {
        "unet_xl": ["full_precision", "quantized"], "clip1": ["full_precision", "quantized"], "vae": ["full_precision"],
    }  # fmt: skip
    assert found["clip1"]["quantized"] == MemoryTaken(1, 3, 2)._asdict() | {"device": "cpu"}
    assert opened == [(f"full {PARTS[0]}", 0)] * 2 + [("full clip1", 0), ("int8 clip1", 0), ("full vae", 0)]


def test_a_simulated_denoiser_is_no_engine_and_precise_steps_have_one_beside_it(monkeypatch):
    found, opened = measured(monkeypatch, simulated="no kernels")
    assert found["unet_xl"]["quantized"] == {"reason": "simulated: no kernels"} and len(opened) == 4
    _, opened = measured(monkeypatch, **{"unet_xl/h": "weights alone"})
    assert opened[1:3] == [("full unet_xl", 0), ("weights alone", 1)]
