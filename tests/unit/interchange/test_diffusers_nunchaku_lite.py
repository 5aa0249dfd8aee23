"""Folders for nunchaku_lite: what they hold, and traps. ``tests.programs`` has diffusers load one."""

import json

import pytest
import torch
from safetensors.torch import load_file

from sd_quant.errors import ArtifactError
from sd_quant.quantization.assignment import LayerAssignment

from ..tiny import changed

pytestmark = pytest.mark.commit

NAME = "diffusers_nunchaku_lite"
OPTIONS = {"rank": 0.1, "smoothing": "modelopt"}  # with factors in front of every layer


@pytest.fixture(scope="module")
def made(written_once):
    """A tiny Flux with its assignment, and the folder that is written."""
    return written_once(NAME, "flux", "int4", **OPTIONS)


def held(assignment) -> list[LayerAssignment]:
    return [layer for layer in assignment.values() if layer.format]


@pytest.mark.slow
@torch.no_grad()
def test_files_hold_what_diffusers_config_says(made):
    case, assignment, folder = made
    config = json.loads((folder / case.component / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "nunchaku_lite" and config["compute_dtype"] == "float16"
    section = config["svdq_w4a4"]
    assert {key: section[key] for key in ("precision", "group_size", "rank")} == {
        "precision": "int4", "group_size": 64, "rank": 16,
    }  # fmt: skip
    assert section["targets"] == [row.name for row in held(assignment)]
    (file,) = (folder / case.component).glob("*.safetensors")
    tensors = load_file(file)
    assert not any(name.endswith(("smooth_factor_orig", "wcscales", "wtscale")) for name in tensors)
    assert all(f"{name}.weight" not in tensors for name in section["targets"])


# What a folder cannot hold, and folders that are wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda section: section.update(rank=32), "rank 32"),
        (lambda section: section.update(precision="nvfp4", group_size=16), "nvfp4"),
        (lambda section: section.update(group_size=32), "groups of 32"),
        (lambda section: section.update(targets="all"), "targets 'all'"),
        (lambda section: section["targets"].append("proj_out"), "'proj_out'"),
        (lambda section: section["targets"].append(section["targets"][0]), "twice"),
        (lambda section: section["targets"].pop(), "unknown"),
        (lambda section: section.pop("rank"), "broken quantization_config"),
    ],
)
def test_a_config_that_the_weights_contradict_is_refused(made, tmp_path, change, words):
    case, _, folder = made
    changed(folder / case.component, tmp_path / case.component, config=lambda config: change(config["svdq_w4a4"]))
    with pytest.raises(ArtifactError, match=words):
        case.read(tmp_path, NAME)


FIRST = "transformer_blocks.0.attn.to_q"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.update({f"{FIRST}.proj_down": torch.zeros(128, 24)}), "proj_down"),
        (lambda tensors: tensors.update({f"{FIRST}.wzeros": torch.zeros(2, 128)}), "wzeros"),
        (lambda tensors: tensors[f"{FIRST}.smooth_factor"].zero_(), "not above 0"),
        (lambda tensors: tensors.update({f"{FIRST}.bias": torch.zeros(64)}), "bias"),
        (lambda tensors: tensors.pop(f"{FIRST}.bias"), "missing"),
    ],
)
def test_broken_tensors_are_refused(made, tmp_path, change, words):
    case, _, folder = made
    changed(folder / case.component, tmp_path / case.component, change)
    with pytest.raises(ArtifactError, match=words):
        case.read(tmp_path, NAME)
