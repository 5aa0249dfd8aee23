"""Sweeps through launchers leave what one without leaves, also when the command is killed while jobs run."""

import importlib.metadata
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from .shared import json_of, record_of, same, well, without_times
from .sweeping import JOBS, ended

pytestmark = [pytest.mark.nightly, pytest.mark.needs(cores=2, memory_gb=6, files=1000)]

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
ONE_HOST = ["hydra/launcher=one_host", "hydra.launcher.n_jobs=2"]
THREE = "quant_level=1,2,3"


def needs(package: str) -> pytest.MarkDecorator:
    missing = {package, f"hydra-{package}-launcher"} - INSTALLED
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(sorted(missing))} are not installed")


@pytest.fixture
def killed(sweep) -> Iterator[Callable[..., int]]:
    """Kills a command's process, not those of its jobs, when all jobs have begun to write; returns their group."""
    groups = []

    def kill(*knobs: str) -> int:
        command = sweep.begun(*knobs)
        groups.append(command.pid)
        command.kill()
        command.wait()
        assert not list(sweep.folder.glob("*/metrics.json"))
        return command.pid

    yield kill
    for group in groups:
        with suppress(ProcessLookupError):  # everybody has left it
            os.killpg(group, signal.SIGKILL)


@needs("joblib")
def test_on_one_host_jobs_end_with_the_command_and_one_that_fails_stops_no_other(sweep, killed):
    folder = sweep.folder
    (folder / "quant_level=3/.lock").mkdir(parents=True)  # what that job opens first, as a file
    killed(*ONE_HOST, THREE)
    said, complaint = ended(sweep.begin(*ONE_HOST, THREE), 1)
    assert "error: 1 of 3 jobs is not done (quant_level=3: " in complaint and ".lock is no file" in complaint
    assert all(f"job {number} of 3: quant_level={number}" in said for number in (1, 2, 3))
    assert json_of(folder / "quant_level=3/failure.json")["exit_code"] == 2
    assert ".lock is no file" in (folder / "quant_level=3/quantize.log").read_text()
    logs = "".join((folder / job / "quantize.log").read_text() for job in JOBS)
    assert "which works in" not in logs, "no job has waited"
    assert same(without_times(folder / "summary.csv")[:2], sweep.undisturbed)

    here = len(os.sched_getaffinity(0))
    for job in JOBS:
        machine = record_of(folder / job)["environment"]["machine"]
        assert machine["usable_cores"] in (max(1, here // 2), here - here // 2)


@needs("submitit")
def test_jobs_of_submitit_outlive_the_command_and_are_waited_for(sweep, killed):
    given, logs = "hydra/launcher=slurm_local", [sweep.folder / job / "quantize.log" for job in JOBS]
    group = killed(given)
    os.killpg(group, signal.SIGSTOP)  # else they may be done before others wait
    again = sweep.begin(given)
    try:
        for _ in range(6000):
            if again.poll() is not None or all("waiting for another process" in log.read_text() for log in logs):
                break
            time.sleep(0.05)
        early = list(sweep.folder.glob("*/metrics.json"))
    finally:
        os.killpg(group, signal.SIGCONT)
    ended(again)
    assert not early
    for log in map(Path.read_text, logs):
        assert "waiting for another process, which works in" in log and "done before" in log
    sweep.is_whole()


@needs("joblib")
def test_a_search_proposes_as_many_jobs_at_a_time_as_the_launcher_does(process, sweep):
    given = sweep.arguments(THREE, *ONE_HOST, "verdict.speedup=1.01")
    for number in (2, 3):
        said = well(process(*given, f"search={number}")).stdout
        assert f"search for {number} of the grid's 3 jobs in {sweep.folder}" in said
        rows = without_times(sweep.folder / "summary.csv")
        assert len(list(sweep.folder.glob("*/metrics.json"))) == len(rows) == number
        assert f"{number} of the grid's 3 jobs, proposed by " in said
    assert "job 3 of 3: " in said
