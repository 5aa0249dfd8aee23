"""What is made of Slurm's answers; a real one stands behind ``tests/cli/cluster``."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from submitit.core.utils import UncompletedJobError

from sd_quant.errors import ResourceError
from sd_quant.launchers import slurm
from sd_quant.report.summary import FAILURE, SWEEP

pytestmark = pytest.mark.commit


@pytest.fixture
def squeue(monkeypatch, tmp_path):
    """``squeue(printed, complaint, code)``: what the program of this name answers from now on."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")

    def answer(printed: str, complaint: str = "", code: int = 0) -> None:
        script = programs / "squeue"
        says = f"printf '{printed}'\necho '{complaint}' >&2\nexit {code}\n"
        script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{says}')
        script.chmod(0o755)

    answer.asked = tmp_path / "asked"
    return answer


@pytest.fixture
def queue() -> slurm.Queue:
    found = slurm.Queue()
    for job in ("7_0", "7_1", "8"):
        found.register_job(job)
    return found


def test_all_jobs_are_asked_for_at_once_and_those_that_ended_no_more(squeue, queue):
    squeue("7_0|COMPLETED|n1\\n7_1|SUSPENDED|n2\\n8|PENDING|\\n")
    queue.update()
    assert [queue.is_done(job, mode="cache") for job in ("7_0", "7_1", "8")] == [True, False, False]
    squeue("7_1|OUT_OF_MEMORY|n2\\n8|NODE_FAIL|n1\\n")
    queue.update()
    assert all(queue.is_done(job, mode="cache") for job in ("7_0", "7_1", "8"))
    queue.update()
    asked = squeue.asked.read_text().splitlines()
    assert len(asked) == 2 and all("--jobs=7,8 " in line for line in asked)
    assert queue.get_info("7_1", mode="cache") == {"State": "OUT_OF_MEMORY", "NodeList": "n2"}


def test_a_job_that_the_queue_has_forgotten_has_ended(squeue, queue):
    squeue("", "slurm_load_jobs error: Invalid job id specified", 1)
    queue.update()
    assert queue.get_state("8", mode="cache") == slurm.FORGOTTEN and queue.is_done("8", mode="cache")


def test_a_queue_that_does_not_answer_says_nothing_of_jobs(squeue, queue, caplog):
    squeue("", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    with caplog.at_level(logging.WARNING):
        queue.update()
    assert not queue.is_done("8", mode="cache")
    assert "squeue does not answer: slurm_load_jobs error: Unable to contact slurm controller" in caplog.text


def dead(folder: Path, state: str, stderr: str) -> SimpleNamespace:
    """A job that has left no result, as submitit has it."""
    watcher, paths = slurm.Queue(), {"folder": folder / "7_1", "stdout": folder / "out", "stderr": folder / "err"}
    watcher._info_dict["7_1"] = {"State": state, "NodeList": "n2"}
    if stderr:
        paths["stderr"].write_text(stderr)
    return SimpleNamespace(
        job_id="7_1", watcher=watcher, paths=SimpleNamespace(**paths), stderr=lambda: stderr or None,
        submission=lambda: SimpleNamespace(args=([], "hydra.sweep.dir", 1)),
    )  # fmt: skip


@pytest.fixture
def results(monkeypatch, tmp_path):
    """What Hydra gets of a dead job, the second of a sweep."""
    (tmp_path / SWEEP).write_text(json.dumps({"jobs": [{"name": "a"}, {"name": "b"}]}))
    (tmp_path / "b").mkdir()

    def died(_):
        raise UncompletedJobError

    monkeypatch.setattr(slurm, "wait_for_results", died)
    return lambda state, stderr="": slurm.results_of(dead(tmp_path, state, stderr), tmp_path)[0]


@pytest.mark.parametrize(("state", "stderr", "told"), [
    ("OUT_OF_MEMORY", "a\nslurmstepd: error: Job 7 exceeded memory limit\nsrun: error: b\n",
     "OUT_OF_MEMORY on n2: slurmstepd: error: Job 7 exceeded memory limit; raise hydra.launcher.mem_gb"),
    ("FAILED", "a\nslurmstepd-n2: error: Exceeded job memory limit\nb\n",
     "FAILED on n2: slurmstepd-n2: error: Exceeded job memory limit; raise hydra.launcher.mem_gb"),
    ("TIMEOUT", "c\n", "TIMEOUT on n2: c; raise hydra.launcher.timeout_min"),
    ("FAILED", "x\nsrun: error: n2: task 0: Killed\n", "FAILED on n2: srun: error: n2: task 0: Killed" + slurm.KILLED),
    ("CANCELLED", "\n", "CANCELLED on n2"),
    ("FAILED", "", "FAILED on n2 and wrote nothing into {folder}; do all nodes share this folder?"),
])  # fmt: skip
def test_a_dead_job_is_one_that_failed_with_what_slurm_says(results, tmp_path, state, stderr, told):
    result = results(state, stderr)
    assert result.status == JobStatus.FAILED
    reason = f"Slurm's job 7_1 ended as {told.format(folder=tmp_path)}"
    with pytest.raises(ResourceError, match=f"^{re.escape(reason)}"):
        _ = result.return_value
    failure = json.loads((tmp_path / "b" / FAILURE).read_text())
    assert failure == {"status": "failed", "reason": reason, "exit_code": 4}


def test_a_job_that_failed_before_its_first_word_says_why(monkeypatch, results, tmp_path):
    early = JobReturn(status=JobStatus.FAILED, _return_value=UncompletedJobError("timed-out too many times"))
    monkeypatch.setattr(slurm, "wait_for_results", lambda _: [early])
    assert results("COMPLETED").status == JobStatus.FAILED
    told = "its time on the cluster was over; raise hydra.launcher.timeout_min"
    assert told in (tmp_path / "b" / FAILURE).read_text()
    (tmp_path / "b" / FAILURE).write_text("its own")
    assert results("COMPLETED") is early and (tmp_path / "b" / FAILURE).read_text() == "its own"


def test_a_job_that_died_after_its_last_word_is_done(results, tmp_path):
    (tmp_path / "b/metrics.json").write_text("{}")
    assert results("NODE_FAIL", "x").status == JobStatus.COMPLETED
    assert not (tmp_path / "b" / FAILURE).exists()


def test_the_types_of_gpus_are_read_as_sinfo_prints_them(monkeypatch):
    printed = "n1|gpu:a100:4(S:0-1),gpu:h100:1\nn2|gpu:2(S:0)\nn3|(null)\nn4|nic:1,gpu:nvidia_l40s:2\n"
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=printed))
    assert slurm.gpus_of_nodes(None) == {"n1": {"a100", "h100"}, "n2": set(), "n3": set(), "n4": {"nvidia_l40s"}}


@pytest.mark.parametrize(("theirs", "all_excluded"), [("n9", "n9,n1,n2"), (None, "n1,n2")])
def test_jobs_of_one_need_are_one_array(monkeypatch, tmp_path, theirs, all_excluded):
    """Each without the nodes that it cannot use, beside those that the user leaves out; results keep their order."""
    (tmp_path / SWEEP).write_text(json.dumps({"jobs": [{"name": name} for name in "abcd"]}))
    executor, arrays = SimpleNamespace(parameters={"exclude": theirs} if theirs else {}), []

    def submit(executor, submissions):
        arrays.append((executor.parameters.get("exclude"), [submission.args[2] for submission in submissions]))
        return [f"job of {submission.args[2]}" for submission in submissions]

    monkeypatch.setattr(slurm, "submit", submit)
    submissions = [SimpleNamespace(args=([], "", number)) for number in range(4)]
    jobs = slurm.submitted(executor, tmp_path, {"a": ["n1", "n2"], "b": [], "c": ["n1", "n2"]}, submissions)
    assert jobs == [f"job of {number}" for number in range(4)]
    assert arrays == [(all_excluded, [0, 2]), (theirs, [1, 3])]
