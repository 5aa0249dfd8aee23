"""Which layers a calibration looks at, and what is said before it."""

import logging
from types import SimpleNamespace

from torch import nn

from sd_quant.quantization.statistics import Statistics
from sd_quant.stages import calibrate
from sd_quant.stages.calibrate import announce_calibration
from tests.presets import job

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


def test_linears_that_a_recipe_may_include_are_looked_at_and_asked_of_nobody_else(monkeypatch, tmp_path):
    network = nn.ModuleDict({"time": nn.Linear(4, 4), "first": nn.Conv2d(4, 4, 3), "to_q": nn.Linear(4, 4)})
    roles = {"time": "excluded", "first": "excluded", "to_q": "qkv"}
    taken = {}
    monkeypatch.setattr(calibrate, "empty_denoiser", lambda _: network)
    monkeypatch.setattr(calibrate, "load_model", lambda _: None)
    monkeypatch.setattr(calibrate, "calibrate", lambda _, names, *rest, **others: taken.update(ours=names) or NONE)
    monkeypatch.setattr(
        calibrate, "read_statistics", lambda _, layers, *rest: taken.update(needed=list(layers), besides=list(rest[-1]))
    )
    monkeypatch.setattr(calibrate, "denoiser_part", lambda _: SimpleNamespace(contract=None))
    monkeypatch.setattr(calibrate, "origin", lambda *_: {})
    checkpoint = SimpleNamespace(family=SimpleNamespace(GUIDES=True))
    calibrate.statistics_of(checkpoint, roles, job("cache.dir=null"), "ab")
    calibrate.statistics_of(checkpoint, roles, job(f"calibration={tmp_path}"), "ab")
    assert taken == {"ours": ["time", "to_q"], "needed": ["to_q"], "besides": ["time"]}
