"""Caches and candidates."""

from pathlib import Path

import pytest

from sd_quant.config import Judge, QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.knobs import read

from .composition import changed


def test_a_cache_that_cannot_be_written_is_refused(mappings, tmp_path):
    (tmp_path / "file").touch()
    job = read(QuantizeJob, changed(mappings["quantize"], "cache.dir", str(tmp_path / "file" / "cache")))
    with pytest.raises(ConfigError, match=r"^the cache .* cannot be written, .*; set cache\.dir"):
        job.check_files()


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
