"""What is said before a calibration."""

import logging
from types import SimpleNamespace

from sd_quant.stages.calibrate import announce_calibration


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
