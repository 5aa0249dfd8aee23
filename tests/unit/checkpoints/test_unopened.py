"""Contents of files before a checkpoint is opened: its kind, its parts, the size of its images, its licence."""

import gzip
import json
import os
import tarfile

import pytest
import torch
from safetensors.torch import save_file

from sd_quant.checkpoints.unopened import check_kind, licence_of, own_parts, own_size
from sd_quant.errors import ConfigError
from sd_quant.places import HOME

pytestmark = pytest.mark.commit

FOLDER = "the folder of a diffusers pipeline, which has model_index.json"
ALSO = f"{FOLDER}, a .nemo archive or its folder, or one .safetensors file in Stability AI's layout"
MAKE = "make one with diffusers' from_single_file and save_pretrained"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Some of what a path may lead to, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("pipeline/model_index.json", "pipeline/unet/config.json", "nemo/model_config.yaml", "other/a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for name in ("a.md", "a.ckpt", "a.nemo", "a.safetensors", "A.NEMO", "a.SafeTensors"):
        (tmp_path / name).write_bytes(b"# no checkpoint" * 100)
    (tmp_path / "packed").write_bytes(gzip.compress(b"{}"))
    with tarfile.open("archive", "w") as archive:
        archive.add("other")
    os.mkfifo("pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("family", "path", "found", "takes", "advice"),
    [
        ("sd15", "a.nemo", "a file", FOLDER, MAKE),
        ("flux", "other", "a folder without model_index.json", FOLDER, "check the path"),
        ("sd21", "nemo", "a folder without model_index.json", FOLDER, "check the path"),
        ("pixart", "pipeline/unet", "a folder without model_index.json", FOLDER, "give the folder around it, pipeline"),
        ("sd15", "pipe", "a device or a pipe", FOLDER, "check the path"),
        ("sdxl", "a.md", "a file of another kind", ALSO, MAKE),
        ("sdxl", "other", "a folder without model_index.json and model_config.yaml", ALSO, "check the path"),
    ],
)
def test_what_a_family_is_not_read_from_is_refused_with_what_it_takes(here, family, path, found, takes, advice):
    with pytest.raises(ConfigError) as refused:
        check_kind(here / path, family)
    said = str(refused.value).replace(f"{here}/", "")
    assert said == f"model.path is {path}, {found}, expected for {family} {takes}; {advice}"


def test_what_is_read_passes(here):
    check_kind(here / "pipeline", "flux")
    for path in ("pipeline", "nemo", "a.nemo", "a.safetensors", "A.NEMO", "a.SafeTensors", "packed", "archive"):
        check_kind(here / path, "sdxl")


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


@pytest.mark.parametrize(
    ("file", "content", "size"),
    [
        ("unet/config.json", '{"sample_size": 128}', (1024, 1024)),
        ("transformer/config.json", '{"sample_size": [64, 96]}', (512, 768)),
        ("unet/config.json", '{"sample_size": 64.0}', None),  # and next 480 pixels, which no knob takes either
        *(("unet/config.json", json.dumps({"sample_size": side}), None) for side in (60, 10**12, [1, 2, 3])),
        *(("unet/config.json", text, None) for text in ("{}", "[")),
        ("model_config.yaml", NEMO.format(8, 64), (64, 64)),
        ("model_config.yaml", "model:\n  " + NEMO.format(8, 64).replace("\nf", "\n  f"), (64, 64)),
        ("model_config.yaml", NEMO.format(64, 256), None),  # SDXL's own, where neither is meant
        ("model_config.yaml", "nothing: 1", None),
    ],
)
def test_what_a_folder_says_of_its_images(tmp_path, file, content, size):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    if "/" in file:
        (tmp_path / "model_index.json").write_text("{}")
    assert own_size(tmp_path) == size


def test_what_a_file_says_of_its_images(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    (tmp_path / "broken.nemo").write_bytes(bytes(1024))
    (tmp_path / "link.NEMO").symlink_to(MINI)
    assert own_size(MINI) == own_size(tmp_path / "link.NEMO") == (64, 64)
    assert not any(own_size(tmp_path / name) for name in ("one.safetensors", "broken.nemo", "absent"))


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
