"""The real commands in real processes, and one real run of the main job that every test of its results shares."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SAMPLING = ("infer.steps=5", "infer.num_timed_runs=3", "infer.num_warmup_runs=1")
PROMPTS = ["a glossy icon of a rocket", "a glossy icon of a teapot"]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The one that ships with the project."""
    path = REPOSITORY / "checkpoints/sdxl_mini.nemo"
    assert path.is_file(), f"{path} is missing; it ships with the project"
    return path


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen]:
    """``start(script, *arguments)`` in the repository, in a process group of its own."""

    def popen(script: str, *arguments: str | Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return popen


@pytest.fixture(scope="session")
def command(start) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script to its end, at most ten minutes."""

    def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess:
        with start(script, *arguments) as process:
            try:
                stdout, stderr = process.communicate(timeout=600)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@dataclass(frozen=True)
class MainJob:
    directory: Path
    cache: Path
    statistics: Path  # its entry in that cache
    stdout: str
    prompts: list[str]
    sampling: tuple[str, ...]


@pytest.fixture(scope="session")
def main_job(command, checkpoint, tmp_path_factory) -> MainJob:
    """``quantize.py quant_level=3 alpha=0.8``, with fewer prompts, steps and repeats."""
    folder = tmp_path_factory.mktemp("main_job")
    directory, cache = folder / "run", folder / "cache"
    result = command(
        "quantize.py", "quant_level=3", "alpha=0.8", "calib_size=4", "quantize.n_steps=5", f"model.path={checkpoint}",
        f"cache.dir={cache}",
        f"infer.prompts=[{','.join(PROMPTS)}]", f"hydra.run.dir={directory}", *SAMPLING,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    (statistics,) = (cache / "statistics").iterdir()
    return MainJob(directory, cache, statistics, result.stdout, PROMPTS, SAMPLING)
