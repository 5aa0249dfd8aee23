"""Sweeps through launchers leave what one without leaves, also when the command is killed while jobs run."""

import csv
import importlib.metadata
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

JOBS = ["quant_level=1", "quant_level=2"]
TIMES = ("_ms", "_speedup", "_time", "seconds", "memory_bytes")
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
ONE_HOST = ["hydra/launcher=one_host", "hydra.launcher.n_jobs=2"]


def needs(package: str) -> pytest.MarkDecorator:
    missing = {package, f"hydra-{package}-launcher"} - INSTALLED
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(sorted(missing))} are not installed")


@pytest.fixture(scope="module")
def arguments(checkpoint, tmp_path_factory):
    """Of a sweep into a folder; what the jobs share is made once for all tests of this file."""
    cache = tmp_path_factory.mktemp("cache")

    def arguments(sweep: Path, *more: str) -> list[str]:
        return [
            "quantize.py", "-m", "quant_level=1,2", "calib_size=1", "quantize.n_steps=2", "infer.steps=2",
            "infer.prompts=[a rocket]", "infer.num_timed_runs=1", "infer.num_warmup_runs=0", "export_trt=none",
            f"model.path={checkpoint}", f"cache.dir={cache}", f"hydra.sweep.dir={sweep}", *more,
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="module")
def unbroken(command, arguments, tmp_path_factory) -> list[dict]:
    """The table of a sweep without a launcher."""
    sweep = tmp_path_factory.mktemp("unbroken") / "sweep"
    result = command(*arguments(sweep))
    assert result.returncode == 0, result.stderr[-3000:]
    return table(sweep)


def table(sweep: Path) -> list[dict]:
    """Without the columns that another run has otherwise."""
    with (sweep / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def same(rows: list[dict], expected: list[dict]) -> bool:
    """Up to rounding: a worker with fewer cores adds the same numbers up in another order. Seen: 1e-5 of a value."""
    return len(rows) == len(expected) and all(
        row.keys() == other.keys() and all(equal(row[name], other[name]) for name in row)
        for row, other in zip(rows, expected, strict=True)
    )


def equal(value: str, other: str) -> bool:
    with suppress(ValueError):
        return float(value) == pytest.approx(float(other), rel=1e-3)
    return value == other


@pytest.fixture
def killed(start) -> Iterator[Callable[..., None]]:
    """Starts a command, and kills its process, not those of its jobs, when all jobs have begun to write."""
    groups = []

    def kill(arguments: list[str], sweep: Path) -> None:
        with start(*arguments) as process:
            groups.append(process.pid)
            deadline = time.monotonic() + 300
            while not all((sweep / job / "config.yaml").exists() for job in JOBS):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.kill()
        assert not list(sweep.glob("*/metrics.json"))

    yield kill
    for group in groups:
        with suppress(ProcessLookupError):  # everybody has left it
            os.killpg(group, signal.SIGKILL)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@needs("joblib")
def test_on_one_host_jobs_end_with_the_command_and_one_that_fails_stops_no_other(
    unbroken, killed, command, arguments, tmp_path
):
    given = arguments(tmp_path, *ONE_HOST, "quant_level=1,2,3")
    (tmp_path / "quant_level=3" / ".lock").mkdir(parents=True)  # what that job opens first, as a file
    killed(given, tmp_path)

    result = command(*given)
    assert result.returncode == 1
    assert "error: 1 of 3 jobs are not done (quant_level=3: it crashed: IsADirectoryError" in result.stderr
    for number in (1, 2, 3):
        assert f"job {number} of 3: quant_level={number}" in result.stdout
    assert json.loads(text(tmp_path / "quant_level=3" / "failure.json"))["exit_code"] == 1
    assert "Traceback (most recent call last)" in text(tmp_path / "quant_level=3" / "quantize.log")
    assert "which works in" not in "".join(text(tmp_path / job / "quantize.log") for job in JOBS)  # no job has waited
    assert same(table(tmp_path)[:2], unbroken)

    here = len(os.sched_getaffinity(0))
    for job in JOBS:
        machine = json.loads(text(tmp_path / job / "metrics.json"))["environment"]["machine"]
        assert machine["usable_cores"] in (max(1, here // 2), here - here // 2)


@needs("submitit")
def test_jobs_of_submitit_outlive_the_command_and_are_waited_for(unbroken, killed, command, arguments, tmp_path):
    given = arguments(tmp_path, "hydra/launcher=slurm_local")
    killed(given, tmp_path)

    result = command(*given)
    assert result.returncode == 0, result.stderr[-3000:]
    for job in JOBS:
        log = text(tmp_path / job / "quantize.log")
        assert "waiting for another process, which works in" in log and "done before" in log
    assert same(table(tmp_path), unbroken)


@needs("ray")
def test_a_local_ray_leaves_the_same(unbroken, command, arguments, tmp_path):
    result = command(*arguments(tmp_path, "hydra/launcher=ray_local"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert same(table(tmp_path), unbroken)
