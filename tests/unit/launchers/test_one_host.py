"""Which GPU and which cores each of several jobs on one machine gets."""

import logging
import os
import threading

import pytest
import torch

from sd_quant.cache import try_lock
from sd_quant.launchers import one_host

pytestmark = pytest.mark.commit


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


@pytest.mark.parametrize(("gpus", "cores", "jobs"), [(8, 64, 8), (1, 64, 1), (0, 64, 16), (0, 2, 1)])
def test_a_machine_takes_a_job_for_each_gpu_or_for_a_few_cores(machine, gpus, cores, jobs):
    machine(gpus, cores)
    assert one_host.places() == jobs


def test_gpus_keep_the_names_under_which_they_are_visible(machine, monkeypatch):
    machine(2, 8)
    for chosen, names in (("", ["0", "1"]), ("2,5", ["2", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert one_host.visible_gpus() == names


def test_the_cores_are_shared_out_without_rest():
    for jobs in (1, 2, 3, 8):
        shares = [one_host.cores_of(place, jobs, range(8)) for place in range(jobs)]
        assert sorted(core for cores in shares for core in cores) == list(range(8))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_jobs_than_cores_have_one_each():
    assert [list(one_host.cores_of(place, 4, [3, 7])) for place in range(4)] == [[3], [3], [7], [7]]


def test_more_jobs_than_gpus_share_them():
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
