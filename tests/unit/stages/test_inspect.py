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


@pytest.fixture
def inspected(observe, tmp_path, monkeypatch, capsys):  # noqa: F811
    """``inspected(change)``: what is printed of a pipeline whose observation is ``change``d, and its checkpoint."""

    def run(change=lambda observation: observation, **changes) -> tuple[str, ObservedCheckpoint]:
        checkpoint = observe("PixArtSigmaPipeline", **changes)
        checkpoint = replace(checkpoint, observation=change(checkpoint.observation))
        monkeypatch.setattr(stage, "observed_checkpoint", lambda model: checkpoint)
        model = SimpleNamespace(width=64, height=48, recommended={"calib_size": 8, "steps": 5})
        stage.inspect(SimpleNamespace(model=model), tmp_path)
        return capsys.readouterr().out, checkpoint

    return run


def test_every_network_input_and_role_has_a_row(inspected, tmp_path):
    """Layers that the user excluded are told from those that were observed."""
    printed, checkpoint = inspected(excluded=("transformer_blocks.0.ff.net.0.proj",))
    assert Observation.from_json(json.loads((tmp_path / "observed.json").read_text())) == checkpoint.observation
    for name, kind in (("transformer", "PixArtTransformer2DModel"), ("vae", "AutoencoderKL")):
        (row,) = [line for line in printed.splitlines() if line.startswith(name) and kind in line]
        assert "refused" in row and " M " in row
        assert f"{name} is not exported: not tried" in printed
    for name, shape in checkpoint.parts()["transformer"].contract.inputs.items():
        assert name in printed and " x ".join(map(str, shape)) in printed
    rows = stage.layers_table(Session(checkpoint)).rows
    counts = {role: int(count) for role, count, _ in rows}
    assert all(name in printed for _, _, name in rows)
    assert sum(counts.values()) == len(checkpoint.family.layer_roles(None)) and counts["excluded: model.excluded"] == 1
    assert len([name for name in counts if name.startswith("excluded: ")]) > 1, "the others have reasons"
    assert "calls of the denoiser a step: 1, samples in each for an image: 2" in printed
    assert printed.rstrip().endswith(f"observed: {tmp_path / 'observed.json'}")


def test_what_was_verified_what_is_fixed_and_what_cannot_be_one_batch_is_said(inspected):
    def changed(observation: Observation) -> Observation:
        part = observation.parts["transformer"]
        found = {"openvino": Verified(calls=5, error=1.2e-6)}
        rung = replace(part.rung, name="plain", cause=None, verified=found, refused={"onnxruntime": "no Where"})
        parts = {**observation.parts, "transformer": replace(part, rung=rung)}
        return replace(observation, parts=parts, unequal="masks differ", fixed={"larger": "it fails in vae.decode"})

    printed, checkpoint = inspected(changed)
    assert exported(checkpoint.parts()) == ["transformer"] and "transformer is not exported" not in printed
    for words in (
        "openvino (5 calls within 1e-06)", "transformer in onnxruntime: no Where",
        "prompts of unequal length cannot be in one batch: masks differ", "larger is fixed: it fails in vae.decode",
    ):  # fmt: skip
        assert words in printed


def test_time_is_told_by_the_denoisers_operations(inspected, monkeypatch):
    def refuses(module, inputs):
        raise NotImplementedError("a look at\nnumbers")

    monkeypatch.setattr(stage, "rate", lambda: 1e9)
    for counts, words in (  # of two samples, because of guidance
        (lambda module, inputs: (int(2e9) * len(inputs["hidden_states"]), {}),
         "a step of an image of 64 x 48 takes at least 4 s in torch, the calibration by 8 prompts of 5 steps 3 min (0"),
        (refuses, "time is not estimated, because transformer cannot be called without numbers: a look at numbers"),
    ):  # fmt: skip
        monkeypatch.setattr(stage, "operations", counts)
        assert words in inspected()[0]
