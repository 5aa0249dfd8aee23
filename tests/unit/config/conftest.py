"""Composed configurations, jobs of them, and files that they may name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sd_quant.config import PART_NAMES, artifact
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from tests.nested import with_values

from .composition import JOBS, composed


@pytest.fixture(scope="session")
def mappings() -> dict[str, dict]:
    return {primary: composed(primary) for primary in JOBS}


@pytest.fixture
def job(mappings) -> Callable:
    """The job of a primary with other knobs; of a path the text."""

    def job(primary: str, knobs: dict[str, object]):
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in knobs.items()}
        return read(JOBS[primary], with_values(mappings[primary], texts))

    return job


@pytest.fixture
def refused(job) -> Callable:
    """Such a job has wrong knobs, or names files that are not there."""

    def refused(primary: str, knobs: dict[str, object], sentence: str, kind: type[Exception] = ConfigError) -> None:
        with pytest.raises(kind, match=sentence):
            job(primary, knobs).check_files()

    return refused


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


@pytest.fixture
def images(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for name in "ab":
        (tmp_path / f"images/{name}.png").touch()
    return tmp_path / "images"
