"""What a family's checkpoint may be, by its path."""

import gzip
import os
import tarfile

import pytest

from sd_quant.checkpoints.accepted import check_kind
from sd_quant.errors import ConfigError

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
