"""Which layers a calibration looks at, and what is said before it."""

import logging
from types import SimpleNamespace
from unittest.mock import Mock

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


def test_a_calibration_says_how_long_it_takes_and_a_long_one_the_ways_out(caplog):
    with caplog.at_level(logging.INFO, "sd_quant.stages.calibrate"):
        for batch_size, prompts, device, seconds in (
            (1, 32, "cpu", 0.025), (5, 32, "cuda", 0.1), (1, 32, "cuda", None), (1, 100, "cpu", 9.0)
        ):  # fmt: skip
            given = SimpleNamespace(batch_size=batch_size, snapshots=[32, 64])
            announce_calibration(given, 20, device, prompts, seconds)
    *short, long = caplog.records
    assert [record.getMessage() for record in short] == [
        "calibrating on 32 prompts: 640 calls of the denoiser on cpu, about 16 s",
        "calibrating on 32 prompts: 140 calls of the denoiser on cuda, about 14 s",
        "calibrating on 32 prompts: 640 calls of the denoiser on cuda",
    ]
    assert {record.levelno for record in short} == {logging.INFO} and long.levelno == logging.WARNING
    ways = "calib_size=", "quantize.n_steps=", "on a GPU", "calibration=", "about 5.0 h", "done at 32, 64 prompts"
    assert all(way in long.getMessage() for way in ways)


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


@pytest.fixture
def network(answering) -> nn.ModuleDict:
    network = nn.ModuleDict({"time": nn.Linear(4, 4), "first": nn.Conv2d(4, 4, 3), "to_q": nn.Linear(4, 4)})
    answering(calibrate, empty_denoiser=network, load_model=None, origin={}, denoiser_part=SimpleNamespace(contract=0))
    return network


CHECKPOINT = SimpleNamespace(family=SimpleNamespace(GUIDES=True))
ROLES = {"time": "excluded", "first": "excluded", "to_q": "qkv"}
LOADED = SimpleNamespace(base=CHECKPOINT, roles=ROLES, others={}, part_recipes={})


def test_a_calibration_looks_at_linears_that_a_recipe_may_include_and_has_the_images_negative_prompts(
    network, monkeypatch
):
    """These in turn, as its prompts are others."""
    collect = Mock(return_value=NONE)
    monkeypatch.setattr(calibrate, "calibrate", collect)
    asked = job("infer.prompts=[a cat, a dog]", "infer.negative_prompt=[rain, nude]", "infer.num_samples=2")
    calibrate.statistics_of(LOADED, asked, "ab")
    wanted, _ = collect.call_args.args
    assert wanted.names == ["time", "to_q"] and wanted.sampling.negative_prompts == ["rain", "nude"]


def test_linears_that_a_recipe_may_include_are_asked_of_no_statistics_from_elsewhere(network, monkeypatch, tmp_path):
    read = Mock()
    monkeypatch.setattr(calibrate, "read_statistics", read)
    calibrate.statistics_of(LOADED, job(f"calibration={tmp_path}"), "ab")
    _, needed, *_, besides, _ = read.call_args.args
    assert (needed.keys(), besides.keys()) == ({"to_q"}, {"time"})


@pytest.mark.parametrize(("loras", "shared"), [("fused", False), ("beside", True)])
def test_loras_beside_the_weights_are_calibrated_without_them(loras, shared):
    """So their statistics are those of the checkpoint alone, which the cache may have."""
    made = {"inputs": {"checkpoint": {"sha256": "a"}, "lora 1 at 1.0": {"sha256": "b"}}}
    job = SimpleNamespace(quantize=SimpleNamespace(loras=loras))
    assert (calibrated_sha256(job, made) == "a") == shared
