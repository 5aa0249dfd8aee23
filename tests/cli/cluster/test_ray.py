"""Sweeps on a Ray cluster of three nodes, each with processes of its own, and what befalls them.

Ray and its launcher are not in the environment of the tests: ``make cluster-check`` installs them beside it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..sweeping import ALIKE, JOBS, Launcher, ended

pytestmark = [
    pytest.mark.release, pytest.mark.needs(cores=2, memory_gb=8, files=1000),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make cluster-check installs it"),
]  # fmt: skip
RAY = ["hydra/launcher=ray_cluster", "hydra.launcher.ray.remote.num_gpus=0", "hydra.launcher.ray.remote.num_cpus=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """A head that takes no jobs, and two nodes of a core and a GPU on paper each."""
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        running.add_node(num_cpus=1, num_gpus=1)
    try:
        yield running
    finally:
        running.shutdown()


@pytest.fixture(scope="module")
def launcher(cluster) -> Launcher:
    return Launcher("ray", RAY, {"RAY_ADDRESS": cluster.address}, "Ray ends its jobs; they are done again")


def worker_of(job: Path) -> int:
    """The process that works on a job: it holds the lock in the job's folder."""
    lock = job / ".lock"
    inode = f":{lock.stat().st_ino} "
    (line,) = (line for line in Path("/proc/locks").read_text().splitlines() if inode in line and "->" not in line)
    return int(line.split()[4])


@pytest.mark.parametrize("fault", ALIKE)
def test_what_befalls_slurm_too(sweep, seen, fault):
    seen(fault, ALIKE[fault](sweep))


@pytest.mark.parametrize("tries", [(), ("+hydra.launcher.ray.remote.max_retries=0",)])
def test_a_jobs_process_dies(sweep, seen, tries):
    command = sweep.begun(*tries)
    os.kill(worker_of(sweep.folder / JOBS[0]), signal.SIGKILL)
    ended(command, len(tries))
    if tries:
        assert "Ray's task for it has ended" in sweep.failure_of(JOBS[0])
        assert "1 failed before" in sweep.does_the_rest(JOBS[1])
        seen("it is killed more often than Ray tries", "the job has failed, with the reason; the others go on")
    else:
        sweep.is_whole()
        seen("a job's process is killed", "Ray tries the job again; nothing to do")


def test_a_node_dies_under_a_job(sweep, cluster, seen):
    command = sweep.begun()
    lost = sorted(cluster.worker_nodes, key=lambda node: node.node_ip_address)[0]
    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(num_cpus=1, num_gpus=1)
    sweep.is_whole(command)
    seen("a node dies under a job, and another comes", "Ray gives the job to another node; nothing to do")


def test_no_node_has_the_gpus_that_a_job_asks_for(sweep, seen):
    _, stderr = ended(sweep.begin("hydra.launcher.ray.remote.num_gpus=2"), 2)
    assert "asks for 1 CPU, 2 GPU for a job, and no machine of the Ray cluster has so much" in stderr
    assert "it has 0 CPU, 0 GPU; 1 CPU, 1 GPU; ask for less" in stderr
    assert not sweep.folder.exists()
    seen("no node has the GPUs that a job asks for", "refused at once, with what there is")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it mounts a disk in the place of a folder")
def test_a_node_does_not_share_the_folder(sweep, cluster, seen):
    sweep.folder.mkdir()
    script = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster.address}"]
    start += ["--num-cpus=1", '--resources={"apart": 1}']
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(sweep.folder), *start], start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert any("Ray runtime started" in line for line in node.stdout)
        _, stderr = ended(sweep.begin("+hydra.launcher.ray.remote.resources.apart=1"), 1)
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.communicate()
    assert "which was to do a job" in stderr and "let this machine share the folder" in stderr, stderr
    seen("a node does not share the folder", "no job begins there, and the command says why")


def test_there_is_no_cluster(sweep):
    _, stderr = ended(sweep.start(*sweep.arguments(*RAY), RAY_ADDRESS="127.0.0.1:9"), 4)
    assert "no Ray cluster runs at" in stderr, stderr[-3000:]


def test_a_local_ray_leaves_the_same(sweep):
    sweep.is_whole(sweep.start(*sweep.arguments("hydra/launcher=ray_local")))
