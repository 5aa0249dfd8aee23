"""Sweeps through launchers leave what one without leaves, also when the command is killed while jobs run."""

import importlib.metadata
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from .shared import JOBS as ALL_JOBS
from .shared import json_of, link_cache, record_of, same, well, without_times

pytestmark = [pytest.mark.nightly, pytest.mark.needs(cores=2, memory_gb=6, files=1000)]

JOBS = ALL_JOBS[:2]
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
ONE_HOST = ["hydra/launcher=one_host", "hydra.launcher.n_jobs=2"]


def needs(package: str) -> pytest.MarkDecorator:
    missing = {package, f"hydra-{package}-launcher"} - INSTALLED
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(sorted(missing))} are not installed")


@pytest.fixture
def arguments(sweep_arguments, unbroken_sweep, tmp_path) -> Callable[..., list[str]]:
    """Of a sweep of two of the jobs in the test's folder, with what the unbroken one has left in its cache."""
    link_cache(unbroken_sweep / "cache", tmp_path / "cache")
    return lambda *more: sweep_arguments(tmp_path, "quant_level=1,2", *more)


@pytest.fixture
def sweep(tmp_path) -> Path:
    return tmp_path / "sweep"


@pytest.fixture(scope="module")
def unbroken(unbroken_sweep) -> list[dict]:
    """The table of these jobs without a launcher."""
    return without_times(unbroken_sweep / "table.csv")[: len(JOBS)]


def table(sweep: Path) -> list[dict]:
    return without_times(sweep / "summary.csv")


@pytest.fixture
def killed(start) -> Iterator[Callable[..., int]]:
    """Kills a command's process, not those of its jobs, when all jobs have begun to write; returns their group."""
    groups = []

    def kill(arguments: list[str], sweep: Path) -> int:
        with start(*arguments) as process:
            groups.append(process.pid)
            while not all((sweep / job / "config.yaml").exists() for job in JOBS):
                assert process.poll() is None
                time.sleep(0.05)
            process.kill()
        assert not list(sweep.glob("*/metrics.json"))
        return process.pid

    yield kill
    for group in groups:
        with suppress(ProcessLookupError):  # everybody has left it
            os.killpg(group, signal.SIGKILL)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@needs("joblib")
def test_on_one_host_jobs_end_with_the_command_and_one_that_fails_stops_no_other(
    unbroken, killed, process, arguments, sweep
):
    given = arguments(*ONE_HOST, "quant_level=1,2,3")
    (sweep / "quant_level=3" / ".lock").mkdir(parents=True)  # what that job opens first, as a file
    killed(given, sweep)

    result = process(*given)
    assert result.returncode == 1
    assert "error: 1 of 3 jobs are not done (quant_level=3: " in result.stderr
    assert ".lock is no file" in result.stderr
    for number in (1, 2, 3):
        assert f"job {number} of 3: quant_level={number}" in result.stdout
    assert json_of(sweep / "quant_level=3" / "failure.json")["exit_code"] == 2
    assert ".lock is no file" in text(sweep / "quant_level=3" / "quantize.log")
    assert "which works in" not in "".join(text(sweep / job / "quantize.log") for job in JOBS)  # no job has waited
    assert same(table(sweep)[:2], unbroken)

    here = len(os.sched_getaffinity(0))
    for job in JOBS:
        machine = record_of(sweep / job)["environment"]["machine"]
        assert machine["usable_cores"] in (max(1, here // 2), here - here // 2)


@needs("submitit")
def test_jobs_of_submitit_outlive_the_command_and_are_waited_for(unbroken, killed, start, arguments, sweep):
    given = arguments("hydra/launcher=slurm_local")
    group, logs = killed(given, sweep), [sweep / job / "quantize.log" for job in JOBS]
    os.killpg(group, signal.SIGSTOP)  # else they may be done before others wait
    with start(*given) as again:
        try:
            for _ in range(6000):
                if again.poll() is not None or all("waiting for another process" in text(log) for log in logs):
                    break
                time.sleep(0.05)
            early = list(sweep.glob("*/metrics.json"))
        finally:
            os.killpg(group, signal.SIGCONT)
        _, stderr = again.communicate(timeout=600)
    assert again.returncode == 0 and not early, stderr[-3000:]
    for log in map(text, logs):
        assert "waiting for another process, which works in" in log and "done before" in log
    assert same(table(sweep), unbroken)


@needs("joblib")
def test_a_search_proposes_as_many_jobs_at_a_time_as_the_launcher_does(process, arguments, sweep):
    given = arguments("quant_level=1,2,3", *ONE_HOST, "verdict.speedup=1.01")
    for number in (2, 3):
        said = well(process(*given, f"search={number}")).stdout
        assert f"search for {number} of the grid's 3 jobs in {sweep}" in said
        assert len(list(sweep.glob("*/metrics.json"))) == len(table(sweep)) == number
        assert f"{number} of the grid's 3 jobs, proposed by " in said
    assert "job 3 of 3: " in said
