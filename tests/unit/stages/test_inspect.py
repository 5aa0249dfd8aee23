"""The tables of a pipeline: what is printed is what was observed, and a network that is not exported says why."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sd_quant.models.parts import exported
from sd_quant.observed.checkpoint import Observation, ObservedCheckpoint
from sd_quant.observed.part import Verified
from sd_quant.stages import inspect as stage
from sd_quant.stages.session import Session

from ..observed.conftest import observe, tiny_folder  # noqa: F401  fixtures

pytestmark = pytest.mark.commit

CASE = "PixArtSigmaPipeline"


@pytest.fixture
def inspected(observe, tmp_path, monkeypatch, capsys):  # noqa: F811
    """``inspected(change)``: what is printed of a pipeline whose observation is ``change``d, and its checkpoint."""

    def run(change=lambda observation: observation, **changes) -> tuple[str, ObservedCheckpoint]:
        checkpoint = observe(CASE, **changes)
        checkpoint = replace(checkpoint, observation=change(checkpoint.observation))
        monkeypatch.setattr(stage, "observed_checkpoint", lambda model: checkpoint)
        model = SimpleNamespace(width=64, height=48, recommended={"calib_size": 8, "steps": 5})
        stage.inspect(SimpleNamespace(model=model), tmp_path)
        return capsys.readouterr().out, checkpoint

    return run


def test_every_network_input_and_role_has_a_row(inspected, tmp_path):
    printed, checkpoint = inspected()
    assert Observation.from_json(json.loads((tmp_path / "observed.json").read_text())) == checkpoint.observation
    for name, kind in (("transformer", "PixArtTransformer2DModel"), ("vae", "AutoencoderKL")):
        (row,) = [line for line in printed.splitlines() if line.startswith(name) and kind in line]
        assert "refused" in row and " M " in row
        assert f"{name} is not exported: not tried" in printed
    for name, shape in checkpoint.parts()["transformer"].contract.inputs.items():
        assert name in printed and " x ".join(map(str, shape)) in printed
    roles = checkpoint.family.layer_roles(None)
    assert sum(stage_counts(printed, checkpoint).values()) == len(roles)
    assert "calls of the denoiser a step: 1, samples in each for an image: 2" in printed
    assert printed.rstrip().endswith(f"observed: {tmp_path / 'observed.json'}")


def stage_counts(printed: str, checkpoint: ObservedCheckpoint) -> dict[str, int]:
    """The counts of the table of layers, by what stands in front of them."""
    table = stage.layers_table(Session(checkpoint))
    assert all(row[2] in printed for row in table.rows)
    return {row[0]: int(row[1]) for row in table.rows}


def test_a_layer_that_the_user_excluded_is_told_from_those_that_were_observed(inspected):
    printed, checkpoint = inspected(excluded=("transformer_blocks.0.ff.net.0.proj",))
    counts = stage_counts(printed, checkpoint)
    assert counts["excluded: model.excluded"] == 1
    assert len([name for name in counts if name.startswith("excluded: ")]) > 1, "the others have reasons"


def test_a_network_that_is_exported_says_where_it_was_verified(inspected):
    def verified(observation: Observation) -> Observation:
        part = observation.parts["transformer"]
        found = {"openvino": Verified(calls=5, error=1.2e-6)}
        rung = replace(part.rung, name="plain", cause=None, verified=found, refused={"onnxruntime": "no Where"})
        return replace(observation, parts={**observation.parts, "transformer": replace(part, rung=rung)})

    printed, checkpoint = inspected(verified)
    assert exported(checkpoint.parts()) == ["transformer"]
    assert "openvino (5 calls within 1e-06)" in printed and "transformer in onnxruntime: no Where" in printed
    assert "transformer is not exported" not in printed


def test_what_is_fixed_and_what_cannot_be_one_batch_is_said(inspected):
    printed, _ = inspected(
        lambda observation: replace(observation, unequal="masks differ", fixed={"larger": "it fails in vae.decode"})
    )
    assert "prompts of unequal length cannot be in one batch: masks differ" in printed
    assert "larger is fixed: it fails in vae.decode" in printed


def test_time_is_told_by_the_denoisers_operations(inspected, monkeypatch):
    monkeypatch.setattr(stage, "rate", lambda: 1e9)
    monkeypatch.setattr(stage, "operations", lambda module, inputs: (int(2e9) * len(inputs["hidden_states"]), {}))
    printed, _ = inspected()  # two samples, because of guidance
    assert (
        "a step of an image of 64 x 48 takes at least 4 s in torch, the calibration by 8 prompts of 5 steps 3 min (0"
        in printed
    )

    def counts(module, inputs):
        raise NotImplementedError("a look at\nnumbers")

    monkeypatch.setattr(stage, "operations", counts)
    printed, _ = inspected()
    assert "time is not estimated, because transformer cannot be called without numbers: a look at numbers" in printed
