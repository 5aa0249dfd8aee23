"""Which layers a calibration looks at, and what an assignment and a measurement of sensitivity are given."""

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from sd_quant.cache import Cache
from sd_quant.models.parts import Heads
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.statistics import Sample, Statistics
from sd_quant.simulation.sensitivity import guided
from sd_quant.stages import assign as stage
from sd_quant.stages import calibrate
from sd_quant.stages.calibrate import announce_calibration
from sd_quant.stages.shared import Shared
from tests.presets import job

pytestmark = pytest.mark.commit


def test_sensitivities_are_measured_again_for_anything_else(monkeypatch, answering, tmp_path):
    """Than the same assignment, calls and guidance, which is applied."""
    asked, outputs = [], []

    def switched(simulated, run, layers):
        outputs.append(run())
        return SimpleNamespace(error=lambda quantized: asked.append(quantized) or 1 / (1 + len(quantized)))

    monkeypatch.setattr(stage, "Switched", switched)
    answering(stage, open_simulated=Mock(side_effect=lambda x: {"out": 3 * x}, outputs=("out",)), denoiser_of=None)
    facts = {"inputs": {}, "versions": {}, "machine": {"cpu": "", "usable_cores": 1, "gpus": []}}
    shared = Shared(facts, tmp_path, Cache(tmp_path / "cache", 1e9))
    one, other = ({name: LayerAssignment(name, "ffn", (4, 4), each) for name in "ab"} for each in ("int8", "fp8"))

    def measured(assignment=one, call=0.0, scale=5.0) -> int:
        asked.clear()
        calls = torch.arange(12.0).reshape(3, 2, 2) + call
        statistics = Statistics({}, {"x": Sample(calls, torch.arange(3))})
        found = stage.measure_sensitivity(None, assignment, statistics, scale, shared)
        assert found == {"a": 0.5, "b": 0.5}
        return len(asked)

    assert [measured(), measured()] == [2, 0]
    expected = [guided(3 * call, 5.0) for call in torch.arange(12.0).reshape(3, 2, 2)]
    assert torch.equal(outputs[0], torch.cat(expected))
    assert [measured(other), measured(call=1.0), measured(scale=7.5), measured()] == [2] * 3 + [0]


def test_a_derivation_reads_weights_and_biases_by_the_layers_name(monkeypatch, answering):
    weights = {name: torch.ones(4) for name in ("conv.weight", "conv.bias", "to_q.weight", "norm_q.weight")}
    answering(stage, denoiser_weights=weights)
    monkeypatch.setattr(stage, "derive", lambda *given: given)
    loaded = SimpleNamespace(
        checkpoint=None, roles={"conv": "conv", "to_q": "qkv"}, recipe=Recipe(3.0, None),
        shared_inputs=["to_q"], attentions={"attn": Heads(64)}, exclude=["conv*"], weights_alone=["to_k"],
        own=lambda name, recipe: (name, recipe),
    )  # fmt: skip
    own = Recipe(3.0, 0.5)
    _, weight_of, _, _, inputs, exceptions, heads, bias_of = stage.assign(
        loaded, Statistics({"conv": "ranges"}, {}), ["mid"], {"to_q": own}, "a file says so"
    )
    assert weight_of("to_q") is weights["to_q.weight"]
    assert bias_of("conv") is weights["conv.bias"] and bias_of("to_q") is None
    assert (inputs, heads) == (["to_q"], {"attn": Heads(64)})
    said = {"mid": "a file says so", "conv": "excluded by the preset"}
    assert exceptions == {"to_q": own, "to_k": ("to_k", loaded.recipe)} | said


def test_a_calibration_says_how_many_calls_it_takes(caplog):
    with caplog.at_level(logging.INFO, "sd_quant.stages.calibrate"):
        announce_calibration(SimpleNamespace(batch_size=5), 20, "cuda", 32)
    assert caplog.messages == ["calibrating on 32 prompts: 140 calls of the denoiser on cuda"]


def test_linears_that_may_be_included_are_calibrated_with_negative_prompts_in_turn(answering, monkeypatch, tmp_path):
    """These in turn, as its prompts are others. Of statistics from elsewhere such linears are not asked."""
    network = nn.ModuleDict({"time": nn.Linear(4, 4), "first": nn.Conv2d(4, 4, 3), "to_q": nn.Linear(4, 4)})
    answering(calibrate, empty_denoiser=network, load_model=None, origin={}, denoiser_part=SimpleNamespace(contract=0))
    collect, read = Mock(return_value=Statistics({}, {})), Mock()
    monkeypatch.setattr(calibrate, "calibrate", collect)
    monkeypatch.setattr(calibrate, "read_statistics", read)
    checkpoint = SimpleNamespace(family=SimpleNamespace(GUIDES=True))
    roles = {"time": "excluded", "first": "excluded", "to_q": "qkv"}
    loaded = SimpleNamespace(checkpoint=checkpoint, roles=roles, others={}, part_recipes={})
    asked = job("infer.prompts=[a cat, a dog]", "infer.negative_prompt=[rain, nude]", "infer.num_samples=2")
    calibrate.statistics_of(loaded, asked, "ab")
    wanted, _ = collect.call_args.args
    assert wanted.names == ["time", "to_q"] and wanted.sampling.negative_prompts == ["rain", "nude"]
    calibrate.statistics_of(loaded, job(f"calibration={tmp_path}"), "ab")
    _, needed, *_, besides = read.call_args.args
    assert (needed.keys(), besides.keys()) == ({"to_q"}, {"time"})
