"""Candidates."""

from pathlib import Path

import pytest

from sd_quant.config import Judge


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.gguf", "b/c.safetensors"], ["a.gguf", "c.safetensors"]),
        (["x/unet", "y/unet"], ["x-unet", "y-unet"]),
        (["1/x/unet", "2/x/unet", "a.gguf"], ["1-x-unet", "2-x-unet", "3-..a.gguf"]),
        (["a b;c.gguf"], ["a-b-c.gguf"]),
    ],
)
def test_each_candidate_has_a_name_of_its_own(paths, names, tmp_path, monkeypatch):
    """Which is that of a folder too."""
    monkeypatch.chdir(tmp_path)
    found = Judge(paths, 20, True, 0.95).named()
    expected = [name.replace("..", f"{tmp_path.name}-") for name in names]
    assert list(found) == expected and [path.relative_to(tmp_path) for path in found.values()] == list(map(Path, paths))
