"""Which engine computes each part of framework, unquantized and quantized."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sd_quant.stages import session, variants
from sd_quant.stages.session import Session
from sd_quant.stages.variants import Native, Simulated, keys_of, open_lasting
from tests.presets import job

pytestmark = pytest.mark.commit

PARTS = ("unet", "vae")
EXPORTED, REFUSED = (SimpleNamespace(refused=because) for because in (None, "it draws random numbers"))
LOADED = SimpleNamespace(parts=dict.fromkeys(PARTS, EXPORTED), denoiser="unet")
RUN = Path("run")


def keys(engine: str, simulated: bool = False, assigned: tuple[str, ...] = ("unet",)) -> dict[str, dict]:
    return keys_of(LOADED, assigned, engine, RUN, simulated)


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


def test_what_no_engine_executes_is_simulated_and_the_rest_is_not():
    found = keys("openvino", simulated=True)
    assert found["quantized"] == {"unet": Simulated("unet"), "vae": RUN / "onnx/vae/vae.onnx"}
    assert found["full_precision"] == keys("openvino")["full_precision"]


def test_another_quantized_part_has_an_unquantized_twin_too():
    found = keys("openvino", simulated=True, assigned=PARTS)
    assert found["quantized"] == {"unet": Simulated("unet"), "vae": RUN / "onnx/vae/vae.onnx"}
    assert found["full_precision"]["vae"] == RUN / "full_precision/onnx/vae/vae.onnx"
    assert keys("torch_native", assigned=PARTS)["quantized"]["vae"] == Native("vae", quantized=True)


def test_a_part_that_is_not_exported_is_computed_by_torch():
    loaded = SimpleNamespace(parts={"unet": EXPORTED, "vae": REFUSED}, denoiser="unet")
    found = keys_of(loaded, ["unet"], "openvino", RUN, False)
    assert {variant: engines["vae"] for variant, engines in found.items()} == dict.fromkeys(found, "vae")
    assert found["quantized"]["unet"] == RUN / "onnx/unet/unet.onnx" != found["full_precision"]["unet"]


def test_a_denoiser_that_is_not_exported_is_simulated():
    loaded = SimpleNamespace(parts={"unet": REFUSED, "vae": EXPORTED}, denoiser="unet")
    found = keys_of(loaded, ["unet"], "openvino", RUN, True)
    assert found["full_precision"] == {"unet": "unet", "vae": RUN / "onnx/vae/vae.onnx"}
    assert found["quantized"] == {"unet": Simulated("unet"), "vae": RUN / "onnx/vae/vae.onnx"}


def test_torch_multiplies_codes_in_the_quantized_denoiser_alone():
    found = keys("torch_native")
    assert found["quantized"] == {"unet": Native("unet", quantized=True), "vae": Native("vae", quantized=False)}
    assert found["full_precision"] == {part: Native(part, quantized=False) for part in PARTS}


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


def test_small_engines_that_no_recipe_changes_stay_open_for_the_next_job(monkeypatch, tmp_path):
    """By their files' content: each job has files of its own."""
    opened, closed, lasting, infer = [], [], {}, job().infer

    def opener(key):
        opened.append(key)
        return SimpleNamespace(name="", inputs={}, device=None, close=lambda: closed.append(key))

    def file(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    first, same, other = file("a/vae.plan", "vae"), file("b/vae.plan", "vae"), file("c/vae.plan", "another")
    own = file("a/unet.plan", "unet")
    for key in (first, same, other, own, own, "vae"):
        open_lasting(lasting, infer, opener, {own}, key).close()
    assert opened == [first, other, own, own, "vae"] and closed == [own, own, "vae"] and len(lasting) == 2
    open_lasting(lasting, job("infer.precision=bf16").infer, opener, {own}, first)
    assert opened[5:] == [first]
    monkeypatch.setattr(variants, "LASTING_BYTES", 2)
    open_lasting(lasting, infer, opener, {own}, first)
    assert opened[6:] == [first] and len(lasting) == 3
