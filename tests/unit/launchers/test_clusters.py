"""Sweeps on clusters and on one machine: which GPU and cores each job gets; real ones stand in tests/cli/cluster."""

import json
import logging
import os
import re
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hydra.core.utils import JobReturn, JobStatus
from submitit.core.utils import UncompletedJobError

from sd_quant.cache import try_lock
from sd_quant.errors import ResourceError
from sd_quant.launchers import one_host, slurm
from sd_quant.launchers.ray import has_room, result_of, told, wanted
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE, SWEEP

pytestmark = pytest.mark.commit

# Ray

NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 5e9, "object_store_memory": 2e9, "node:10.0.0.1": 1.0, "big": 2.0}


@pytest.mark.parametrize(("remote", "fit"), [
    ({}, True), ({"num_gpus": 1, "num_cpus": 8}, True), ({"num_gpus": 2}, False), ({"num_cpus": 9}, False),
    ({"resources": {"big": 2}}, True), ({"resources": {"small": 1}}, False),
])  # fmt: skip
def test_a_job_fits_where_all_that_it_asks_for_is_which_is_told_without_rays_own_marks(remote, fit):
    assert has_room(remote, NODE) is fit
    assert told(NODE) == "8 CPU, 1 GPU, 2 big"
    assert told({}) == "0 CPU, 0 GPU"
    assert told(wanted({"num_gpus": 0.5})) == "1 CPU, 0.5 GPU"


def test_a_job_that_ray_gives_up_is_one_that_failed(monkeypatch, tmp_path):
    """And one whose process died after its last word is done."""

    class Died(Exception):
        pass

    def get(task):
        raise Died("The worker died.\n  more")

    fake = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=Died))
    monkeypatch.setitem(sys.modules, "ray", fake)
    (tmp_path / "a").mkdir()
    result = result_of(tmp_path, ("a", None))
    assert result.status == JobStatus.FAILED
    reason = "Ray's task for it has ended: The worker died. more"
    assert json.loads((tmp_path / "a" / FAILURE).read_text()) == {"status": "failed", "reason": reason, "exit_code": 4}
    (tmp_path / "a" / RECORD).touch()
    assert result_of(tmp_path, ("a", None)).status == JobStatus.COMPLETED
    fake.get = lambda task: task
    assert result_of(tmp_path, ("a", "its result")) == "its result"


# Slurm


def test_one_question_is_for_all_jobs_that_run_and_only_an_answer_says_something_of_them(monkeypatch, tmp_path, caplog):
    """squeue is a program that writes down what it is asked. A job that it has forgotten has ended."""
    program, jobs, queue = tmp_path / "bin/squeue", ("7_0", "7_1", "8", "9"), slurm.Queue()
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    for number in jobs:
        queue.register_job(number)

    def done_after(printed: str, complaint: str = "", code: int = 0) -> list[str]:
        says = f"printf '{printed}'\necho '{complaint}' >&2\nexit {code}\n"
        program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{says}')
        program.chmod(0o755)
        queue.update()
        return [number for number in jobs if queue.is_done(number, mode="cache")]

    assert done_after("7_0|COMPLETED|n1\\n7_1|SUSPENDED|n2\\n8|PENDING|\\n9|PENDING|\\n") == ["7_0"]
    silent = "slurm_load_jobs error: Unable to contact slurm controller"
    assert done_after("", silent, 1) == ["7_0"] and f"squeue does not answer: {silent}" in caplog.text
    assert done_after("7_1|OUT_OF_MEMORY|n2\\n8|NODE_FAIL|n1\\n9|RUNNING|n1\\n") == ["7_0", "7_1", "8"]
    assert queue.get_info("7_1", mode="cache") == {"State": "OUT_OF_MEMORY", "NodeList": "n2"}
    assert done_after("", "slurm_load_jobs error: Invalid job id specified", 1) == [*jobs]
    assert queue.get_state("9", mode="cache") == slurm.FORGOTTEN
    queue.update()
    asked = (tmp_path / "asked").read_text()
    assert re.findall(r"--jobs=(\S+) ", asked) == ["7,8,9", "7,8,9", "7,8,9", "9"] and asked.count("\n") == 4


@pytest.fixture
def results(monkeypatch, tmp_path):
    """``results(state, stderr)``: the JobReturn that Hydra gets for the second job of a sweep, which died."""
    (tmp_path / SWEEP).write_text(json.dumps({"jobs": [{"name": "a"}, {"name": "b"}]}))
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(slurm, "wait_for_results", Mock(side_effect=UncompletedJobError))

    def found(state: str, stderr: str = "") -> JobReturn:
        watcher, paths = slurm.Queue(), {name: tmp_path / name for name in ("7_1", "stdout", "stderr")}
        watcher._info_dict["7_1"] = {"State": state, "NodeList": "n2"}
        if stderr:
            paths["stderr"].write_text(stderr)
        dead = Mock(job_id="7_1", watcher=watcher, paths=SimpleNamespace(folder=paths.pop("7_1"), **paths))
        dead.stderr.return_value = stderr or None
        dead.submission.return_value = SimpleNamespace(args=([], "hydra.sweep.dir", 1))
        return slurm.results_of(dead, tmp_path)[0]

    return found


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


def test_a_job_that_failed_before_its_first_word_says_why_and_one_that_died_after_its_last_is_done(
    monkeypatch, results, tmp_path
):
    (tmp_path / "b" / RECORD).write_text("{}")
    assert results("NODE_FAIL", "x").status == JobStatus.COMPLETED and not (tmp_path / "b" / FAILURE).exists()
    (tmp_path / "b" / RECORD).unlink()
    early = JobReturn(status=JobStatus.FAILED, _return_value=UncompletedJobError("timed-out too many times"))
    monkeypatch.setattr(slurm, "wait_for_results", lambda _: [early])
    assert results("COMPLETED").status == JobStatus.FAILED
    told = "its time on the cluster was over; raise hydra.launcher.timeout_min"
    assert told in (tmp_path / "b" / FAILURE).read_text()
    (tmp_path / "b" / FAILURE).write_text("its own")
    assert results("COMPLETED") is early and (tmp_path / "b" / FAILURE).read_text() == "its own"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Pretends to have so many GPUs and cores; places are claimed below ``tmp_path``."""
    monkeypatch.setattr(one_host, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(one_host, "POLLED_EVERY", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def pretend(gpus: int, cores: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    return pretend


def test_a_machine_takes_a_job_for_each_gpu_by_its_visible_name_or_for_a_few_cores(machine, monkeypatch):
    for gpus, cores, jobs in ((8, 64, 8), (1, 64, 1), (0, 64, 16), (0, 2, 1)):
        machine(gpus, cores)
        assert one_host.places() == jobs
    machine(2, 8)
    for chosen, names in (("", ["0", "1"]), ("2,5", ["2", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert one_host.visible_gpus() == names


def test_cores_are_shared_out_without_rest_and_more_jobs_than_gpus_or_cores_share_them():
    for jobs in (1, 2, 3, 8):
        shares = [one_host.cores_of(place, jobs, range(8)) for place in range(jobs)]
        assert sorted(core for cores in shares for core in cores) == list(range(8))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [list(one_host.cores_of(place, 4, [3, 7])) for place in range(4)] == [[3], [3], [7], [7]]
    names = [one_host.place_name(place, ["0", "MIG-1/2"]) for place in range(4)]
    assert names == ["gpu-0-0", "gpu-MIG-1-2-0", "gpu-0-1", "gpu-MIG-1-2-1"]


def test_a_process_keeps_the_place_that_it_found_free(machine, monkeypatch):
    machine(2, 8)
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(list(cores)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    _, other = one_host.claim(["gpu-4-0"])  # of another process
    one_host.settle.cache_clear()
    with other, one_host.settle(os.getpid(), 2, ("4", "5"), tuple(range(8))):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5" and bound == [[4, 5, 6, 7]]
        one_host.settle(os.getpid(), 2, ("4", "5"), tuple(range(8)))
        assert len(bound) == 1
    one_host.settle.cache_clear()


def test_who_finds_no_place_waits_for_one(machine, caplog):
    place, lock = one_host.claim(["cores-0"])
    found = []
    with caplog.at_level(logging.INFO):
        waiting = threading.Thread(target=lambda: found.append(one_host.claim(["cores-0"])))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive() and place == 0
        lock.close()
        waiting.join(10)
    assert caplog.messages == ["waiting for a free place: other jobs on this machine have all 1"]
    [(_, taken)] = found
    with taken, (one_host.LOCKS / "cores-0.lock").open("a") as again:
        assert not try_lock(again)


def test_a_process_ends_with_the_one_that_started_it(machine, monkeypatch):
    parents, ended = iter([7, 7, 1]), []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    one_host.end_with(7)
    assert ended == [1]
