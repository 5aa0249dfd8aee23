"""What a checkpoint says of itself before it is opened: its parts, the size of its images, its licence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd_quant.checkpoints.licence import licence_of
from sd_quant.checkpoints.own_knobs import own_parts, own_size
from sd_quant.places import HOME

pytestmark = pytest.mark.commit

USUAL = ["transformer", "vae", "text_encoder_3"]
WHOLE = {"_class_name": "Some", **{name: ["some", "Kind"] for name in USUAL}}
MINI = HOME / "checkpoints/sdxl_mini.nemo"


@pytest.mark.parametrize(
    ("index", "left"),
    [
        (json.dumps(WHOLE), USUAL),
        (json.dumps(WHOLE | {"text_encoder_3": [None, None]}), USUAL[:2]),
        (json.dumps(WHOLE | {"text_encoder_3": None}), USUAL[:2]),
        (json.dumps({name: WHOLE[name] for name in USUAL[:2]}), USUAL[:2]),
        *((text, USUAL) for text in ("[]", '"text_encoder_3"', "{", "[" * 100_000, "\x00")),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_the_index_has_not_is_left_out(tmp_path, index, left):
    assert own_parts(tmp_path, USUAL) == own_parts(tmp_path / "nowhere", USUAL) == USUAL
    (tmp_path / "model_index.json").write_text(index)
    assert own_parts(tmp_path, USUAL) == left


NEMO = "unet_config: {{image_size: {0}}}\nfirst_stage_config: {{ddconfig: {{resolution: {1}}}}}\n"


def folder(path: Path, denoiser: str, config: object) -> Path:
    (path / denoiser).mkdir(parents=True)
    (path / "model_index.json").write_text("{}")
    (path / denoiser / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def archive(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "model_config.yaml").write_text(config)
    return path


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (lambda path: folder(path, "unet", {"sample_size": 128}), (1024, 1024)),
        (lambda path: folder(path, "transformer", {"sample_size": [64, 96]}), (512, 768)),
        (lambda path: folder(path, "unet", {}), None),
        (lambda path: folder(path, "unet", {"sample_size": 64.0}), None),  # which no knob takes either
        (lambda path: folder(path, "unet", {"sample_size": 10**12}), None),
        (lambda path: folder(path, "unet", {"sample_size": 60}), None),  # 480 pixels, which no knob takes
        (lambda path: folder(path, "unet", {"sample_size": [1, 2, 3]}), None),
        (lambda path: folder(path, "unet", "["), None),
        (lambda path: archive(path, NEMO.format(8, 64)), (64, 64)),
        (lambda path: archive(path, "model:\n  " + NEMO.format(8, 64).replace("\nf", "\n  f")), (64, 64)),
        (lambda path: archive(path, NEMO.format(64, 256)), None),  # SDXL's own, where neither is meant
        (lambda path: archive(path, "nothing: 1"), None),
        (lambda path: path, None),  # which is not there
        (lambda path: MINI, (64, 64)),
        (lambda path: path.with_suffix(".NEMO").symlink_to(MINI) or path.with_suffix(".NEMO"), (64, 64)),
    ],
)
def test_what_a_checkpoint_says_of_its_images(tmp_path, made, size):
    assert own_size(made(tmp_path / "checkpoint")) == size


def test_other_files_say_nothing(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    (tmp_path / "broken.nemo").write_bytes(bytes(1024))
    assert own_size(tmp_path / "one.safetensors") is None and own_size(tmp_path / "broken.nemo") is None


@pytest.mark.parametrize(
    "card, expected",
    [
        ("---\nlicense: openrail++\ntags: [x]\n---\n# SDXL", "openrail++"),
        ("---\r\nlicense: other\r\nlicense_name: flux-dev\r\n---\r\n", "flux-dev"),
        ("---\ntags: [x]\n---\nlicense: mit", None),
        ("# A model\nlicense: mit", None),
        ("---\n: : :\n\t-\n---\n", None),
        ("---\n- license\n---\n", None),
        ("---\nlicense: |\n  a\x1b[2J\n  b\n---\n", None),
        (f"---\nlicense: {'x' * 1000}\n---\n", "x" * 97 + "..."),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_licence_of_a_folder(tmp_path, card, expected):
    (tmp_path / "README.md").write_text(card, newline="")
    assert licence_of(tmp_path) == expected


def test_the_licence_of_what_has_no_card(tmp_path):
    assert licence_of(MINI) is None and licence_of(tmp_path) is None
    for metadata, expected in (({"modelspec.license": "CreativeML Open RAIL-M"}, "CreativeML Open RAIL-M"), ({}, None)):
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata)
        assert licence_of(tmp_path / "model.safetensors") == expected
