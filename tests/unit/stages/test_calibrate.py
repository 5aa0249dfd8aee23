"""Which layers a calibration looks at, and what is said before it."""

import logging
from types import SimpleNamespace

import pytest
from torch import nn

from sd_quant.models.parts import SharedInput
from sd_quant.quantization.hessians import NO_HESSIANS, Hessians
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages import calibrate
from sd_quant.stages.calibrate import announce_calibration, bytes_of_hessians, calibrated_sha256, denoiser_hessians
from tests.presets import job

pytestmark = pytest.mark.commit

NONE = Statistics({}, {})


def knobs(**given) -> SimpleNamespace:
    return SimpleNamespace(**{"batch_size": 1, "devices": 1, "snapshots": [32, 64]} | given)


def test_a_short_one_says_how_long(caplog):
    with caplog.at_level(logging.INFO, "sd_quant.stages.calibrate"):
        announce_calibration(knobs(), 20, "cpu", 32, 0.025)
        announce_calibration(knobs(batch_size=5), 20, "cuda", 32, 0.1)
        announce_calibration(knobs(devices=4), 20, "cuda", 32, None)
    first, second, several = caplog.records
    assert first.getMessage() == "calibrating on 32 prompts: 640 calls of the denoiser on cpu, about 16 s"
    assert second.getMessage() == "calibrating on 32 prompts: 140 calls of the denoiser on cuda, about 14 s"
    assert several.getMessage() == "calibrating on 32 prompts: 640 calls of the denoiser on cuda"
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_long_calibration_says_so_with_the_ways_out(caplog):
    announce_calibration(knobs(), 20, "cpu", 100, 9.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "about 5.0 h" in text and "keeps what is done at 32, 64 prompts" in text
    assert all(way in text for way in ("calib_size=", "quantize.n_steps=", "on a GPU", "calibration="))


def test_hessians_are_summed_of_layers_whose_codes_gptq_chooses_and_of_no_others():
    """Those that read one tensor together, an included linear among them; and their bytes."""
    roles = {"time": "linear", "conv": "conv", "to_q": "qkv", "to_k": "qkv", "last": "excluded"}
    family = SimpleNamespace(shared_inputs=lambda names: [SharedInput(("to_q", "to_k")), SharedInput(("last",))])
    checkpoint, shapes = (
        SimpleNamespace(family=family),
        {"conv": (8, 4, 3, 3), **dict.fromkeys(("to_q", "time"), (8, 300))},
    )

    def found(*overrides):
        knobs = job("quant_level=1", *overrides).quantize
        loaded = SimpleNamespace(checkpoint=checkpoint, roles=roles, shapes=shapes, recipe=knobs)
        return denoiser_hessians(checkpoint, roles, knobs), bytes_of_hessians(loaded)

    assert found() == (NO_HESSIANS, 0) == found("quantize=nvfp4")
    expected = Hessians(256, (("to_q", "to_k"), ("time",), ("conv",)))
    assert found("quantize=nvfp4", "quantize.hessian=256") == (expected, 4 * (4 * 256 * 256 + 36 * 36))


def test_linears_that_a_recipe_may_include_are_looked_at_and_asked_of_nobody_else(monkeypatch, tmp_path):
    network = nn.ModuleDict({"time": nn.Linear(4, 4), "first": nn.Conv2d(4, 4, 3), "to_q": nn.Linear(4, 4)})
    roles = {"time": "excluded", "first": "excluded", "to_q": "qkv"}
    taken = {}
    monkeypatch.setattr(calibrate, "empty_denoiser", lambda _: network)
    monkeypatch.setattr(calibrate, "load_model", lambda _: None)
    monkeypatch.setattr(calibrate, "calibrate", lambda _, names, *rest, **others: taken.update(ours=names) or NONE)
    monkeypatch.setattr(
        calibrate, "read_statistics", lambda _, layers, *rest: taken.update(needed=list(layers), besides=list(rest[-2]))
    )
    monkeypatch.setattr(calibrate, "denoiser_part", lambda _: SimpleNamespace(contract=None))
    monkeypatch.setattr(calibrate, "origin", lambda *_: {})
    checkpoint = SimpleNamespace(family=SimpleNamespace(GUIDES=True))
    calibrate.statistics_of(checkpoint, roles, job("cache.dir=null"), "ab")
    calibrate.statistics_of(checkpoint, roles, job(f"calibration={tmp_path}"), "ab")
    assert taken == {"ours": ["time", "to_q"], "needed": ["to_q"], "besides": ["time"]}


@pytest.mark.parametrize(("loras", "shared"), [("fused", False), ("beside", True)])
def test_loras_beside_the_weights_are_calibrated_without_them(loras, shared):
    """So their statistics are those of the checkpoint alone, which the cache may have."""
    made = {"inputs": {"checkpoint": {"sha256": "a"}, "lora 1 at 1.0": {"sha256": "b"}}}
    job = SimpleNamespace(quantize=SimpleNamespace(loras=loras))
    assert (calibrated_sha256(job, made) == "a") == shared
