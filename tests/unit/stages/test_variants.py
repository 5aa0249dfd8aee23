"""Which engine computes each part of framework, unquantized and quantized."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

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


class Opened(Session):
    parts, parameters, denoiser = dict.fromkeys(PARTS, EXPORTED), {"unet": 10**9, "vae": 10**8}, "unet"
    denoisers, infer = ["unet"], job().infer


@pytest.mark.parametrize(
    ("engine", "exported", "assigned", "simulated", "full_precision", "quantized"),
    [
        ("openvino", PARTS, ["unet"], False, GRAPHS | {"unet": FULL["unet"]}, GRAPHS),
        ("tensorrt", PARTS, ["unet"], False, PLANS | {"unet": FULL_PLANS["unet"]}, PLANS),
        ("openvino", PARTS, ["unet"], True, GRAPHS | {"unet": FULL["unet"]}, GRAPHS | SIMULATED),
        ("openvino", PARTS, PARTS, True, FULL, GRAPHS | SIMULATED),  # another part has an unquantized twin too
        ("openvino", ["unet"], ["unet"], False, FULL | BY_TORCH, GRAPHS | BY_TORCH),
        ("openvino", ["vae"], ["unet"], True, GRAPHS | {"unet": "unet"}, GRAPHS | SIMULATED),
        ("torch_native", PARTS, ["unet"], False, NATIVE, NATIVE | {"unet": CODES["unet"]}),
        ("torch_native", PARTS, PARTS, False, NATIVE, CODES),
    ],
)
def test_each_variant_has_its_own_file_of_what_is_quantized(
    engine, exported, assigned, simulated, full_precision, quantized
):
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


@pytest.mark.parametrize(
    ("own", "precise"),
    [
        (GRAPHS["unet"], RUN / "onnx/unet/unet_weights_alone.onnx"),
        (PLANS["unet"], RUN / "plan/unet_weights_alone.plan"),
        (Native("unet", True), Native("unet", True, weights_alone=True)),
        (Simulated("unet"), Simulated("unet", weights_alone=True)),
        ("unet", "unet"),
    ],
)
def test_precise_steps_have_the_recipes_weights_or_the_unquantized_engine(own, precise):
    assert keys_of_letters("unet", own, FULL["unet"], {"f", "h"}) == {"unet/h": precise, "unet/f": FULL["unet"]}
    assert keys_of_letters("unet", own, FULL["unet"], ()) == {}


def test_torch_quantizes_no_inputs_in_a_precise_step(monkeypatch):
    layer = LayerAssignment("layer", "ffn", (2, 4), "int8", "int8")
    monkeypatch.setattr(open_parts, "open_simulated", lambda checkpoint, assignment, part: assignment["layer"])
    monkeypatch.setattr(
        open_parts, "open_torch_engine", lambda checkpoint, infer, part, assignment: assignment["layer"]
    )
    for kind in (Simulated("unet"), Native("unet", True)):
        opened = [
            variants.open_engine(None, None, {"unet": {"layer": layer}}, key)
            for key in (kind, replace(kind, weights_alone=True))
        ]
        assert opened == [layer, replace(layer, activation_format=None)]


@pytest.mark.parametrize("together", [True, False])
def test_torch_shares_the_weights_of_a_precise_step_if_both_networks_are_open(monkeypatch, together):
    joined, opened = [], Opened(None)
    monkeypatch.setattr(Opened, "infer", job("infer=torch_native", "infer.precise_steps=last1").infer)
    monkeypatch.setattr(session, "fits", lambda *sizes: together)
    monkeypatch.setattr(variants, "open_engine", lambda checkpoint, infer, assignments, key: key)
    monkeypatch.setattr(open_parts, "module_of", lambda engine: engine)
    monkeypatch.setattr(variants, "share_weights", lambda *networks: joined.append(networks))
    shared = SimpleNamespace(directory=RUN)
    precise = variants.variants_of(opened, {"unet": {}}, shared, None).engines["quantized"]["unet/h"]
    assert precise.weights_alone and joined == [(precise, CODES["unet"])] * together
