"""Files that jobs may name."""

from pathlib import Path

import pytest

from sd_quant.config import PART_NAMES, artifact


@pytest.fixture
def archive(tmp_path) -> Path:
    """An empty tar: whole, though no checkpoint."""
    path = tmp_path / "empty.nemo"
    path.write_bytes(bytes(1024))
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    """The directory of an earlier run, as far as the checks look."""
    for part in PART_NAMES:
        path = artifact(tmp_path / "run", "onnx", part)
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "run"
