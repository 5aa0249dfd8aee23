"""Composed configurations, and files that they may name."""

from pathlib import Path

import pytest

from sd_quant.config import PART_NAMES, artifact

from .composition import JOBS, changed, composed


@pytest.fixture(scope="module")
def mappings() -> dict[str, dict]:
    return {primary: composed(primary) for primary in JOBS}


@pytest.fixture
def archive(tmp_path) -> Path:
    """An empty tar: whole, though no checkpoint."""
    path = tmp_path / "empty.nemo"
    path.write_bytes(bytes(1024))
    return path


@pytest.fixture
def quantize_mapping(mappings, archive) -> dict:
    return changed(mappings["quantize"], "model.path", str(archive))


@pytest.fixture
def run(tmp_path) -> Path:
    """The directory of an earlier run, as far as the checks look."""
    for part in PART_NAMES:
        path = artifact(tmp_path / "run", "onnx", part)
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "run"


@pytest.fixture
def picture(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        (tmp_path / f"pictures/{name}.png").touch()
    return tmp_path / "pictures"
