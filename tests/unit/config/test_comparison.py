"""Candidates."""

import os
from pathlib import Path

import pytest

from sd_quant.config import Judge
from sd_quant.errors import ConfigError

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.gguf", "b/c.safetensors"], ["a.gguf", "c.safetensors"]),
        (["x/unet", "y/unet"], ["x-unet", "y-unet"]),
        (["1/x/unet", "2/x/unet", "a.gguf"], ["1-x-unet", "2-x-unet", "3-..a.gguf"]),
        (["a b;c.gguf"], ["a-b-c.gguf"]),
        (["x/y/.."], ["x"]),
        (["report.html", "x/sweep.json"], ["report-html", "sweep-json"]),
        (["a;b", "a b"], ["1-..a-b", "2-..a-b"]),
    ],
)
def test_each_candidate_has_a_name_of_its_own(paths, names, tmp_path, monkeypatch):
    """Which is that of a folder too."""
    monkeypatch.chdir(tmp_path)
    found = (judge := Judge(paths, 20, True, False, 0.95)).named()
    expected = [name.replace("..", f"{tmp_path.name}-") for name in names]
    assert list(found) == expected and [path.relative_to(tmp_path) for path in found.values()] == list(map(Path, paths))
    assert judge.planned() == [{"name": name, "varied": {"candidate": name}} for name in expected]


def test_a_candidate_is_a_file_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="^candidates is .*a.gguf, expected files and folders, and no pipe or device"):
        Judge([str(tmp_path / "a.gguf")], 20, True, False, 0.95).check_files()
