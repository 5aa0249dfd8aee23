"""Which engine computes each part of framework, unquantized and quantized."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sd_quant.stages import session, variants
from sd_quant.stages.session import Session
from sd_quant.stages.variants import Native, Simulated, keys_of
from tests.presets import job

pytestmark = pytest.mark.commit

PARTS = ("unet", "vae")
EXPORTED, REFUSED = (SimpleNamespace(refused=because) for because in (None, "it draws random numbers"))
LOADED = SimpleNamespace(parts=dict.fromkeys(PARTS, EXPORTED), denoiser="unet")
RUN = Path("run")


def keys(engine: str, assigned: tuple[str, ...] = ("unet",)) -> dict[str, dict]:
    return keys_of(LOADED, assigned, engine, RUN, False)


def test_only_the_denoiser_differs_and_each_is_loaded_from_its_own_file():
    for engine, path in (("openvino", "onnx/{0}/{0}.onnx"), ("tensorrt", "plan/{0}.plan")):
        unquantized, quantized, vae = (
            folder / path.format(part)
            for folder, part in ((RUN / "full_precision", "unet"), (RUN, "unet"), (RUN, "vae"))
        )
        assert keys(engine) == {
            "framework": {"unet": "unet", "vae": "vae"},
            "full_precision": {"unet": unquantized, "vae": vae},
            "quantized": {"unet": quantized, "vae": vae},
        }


GRAPHS = {part: RUN / f"onnx/{part}/{part}.onnx" for part in PARTS}
FULL = {part: RUN / f"full_precision/onnx/{part}/{part}.onnx" for part in PARTS}


@pytest.mark.parametrize(
    ("exported", "assigned", "simulated", "full_precision", "quantized"),
    [
        (PARTS, ["unet"], True, {"unet": FULL["unet"], "vae": GRAPHS["vae"]}, {"vae": GRAPHS["vae"]}),
        (PARTS, PARTS, True, FULL, {"vae": GRAPHS["vae"]}),  # another part has an unquantized twin too
        (["unet"], ["unet"], False, {"unet": FULL["unet"], "vae": "vae"}, {"unet": GRAPHS["unet"], "vae": "vae"}),
        (["vae"], ["unet"], True, {"unet": "unet", "vae": GRAPHS["vae"]}, {"vae": GRAPHS["vae"]}),
    ],
    ids=["denoiser", "both parts", "decoder is not exported", "denoiser is not exported"],
)
def test_what_no_engine_executes_is_simulated_and_what_is_not_exported_computed_by_torch(
    exported, assigned, simulated, full_precision, quantized
):
    parts = {part: EXPORTED if part in exported else REFUSED for part in PARTS}
    found = keys_of(SimpleNamespace(parts=parts, denoiser="unet"), assigned, "openvino", RUN, simulated)
    assert found["framework"] == {part: part for part in PARTS} and found["full_precision"] == full_precision
    assert found["quantized"] == ({"unet": Simulated("unet")} if simulated else {}) | quantized


def test_torch_multiplies_codes_in_the_quantized_denoiser_alone():
    found = keys("torch_native")
    assert found["quantized"] == {"unet": Native("unet", quantized=True), "vae": Native("vae", quantized=False)}
    assert found["full_precision"] == {part: Native(part, quantized=False) for part in PARTS}
    assert keys("torch_native", assigned=PARTS)["quantized"]["vae"] == Native("vae", quantized=True)


def test_the_compiled_framework_is_opened_where_it_is_asked_for_and_counts_for_memory(monkeypatch):
    class Opened(Session):
        parts, parameters, denoiser = dict.fromkeys(PARTS, EXPORTED), {"unet": 10**9, "vae": 10**8}, "unet"

    asked = []
    monkeypatch.setattr(session, "fits", lambda memory, what, gpu: asked.append((memory, gpu)) or True)
    monkeypatch.setattr(variants, "open_torch_engine", lambda checkpoint, infer, part, assignment: ("as it is", part))
    monkeypatch.setattr(variants, "open_compiled", lambda checkpoint, infer, part: ("compiled", part))
    opened, infer = Opened(None), job().infer
    with_it, without = (variants.variants_of(opened, infer, {}, RUN, None, baseline) for baseline in (True, False))
    assert "compiled_framework" not in without.engines and with_it.engines["compiled_framework"].keys() == {"unet"}
    assert with_it.engines["compiled_framework"]["unet"] == ("compiled", "unet")
    (memory, gpu), (memory_without, gpu_without) = asked
    assert sum(memory.values()) - sum(memory_without.values()) == 4e9  # fp32
    assert sum(gpu.values()) - sum(gpu_without.values()) == 2e9  # fp16
