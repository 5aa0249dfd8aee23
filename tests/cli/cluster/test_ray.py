"""Sweeps on a Ray cluster of three nodes, each with processes of its own, and what befalls them.

Ray and its launcher are not in the environment of the tests: ``make cluster-check`` installs them beside it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import JOBS, begun, both_end_whole, ended, failure_of, held

pytestmark = [
    pytest.mark.release, pytest.mark.needs(cores=2, memory_gb=8, files=1000),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make cluster-check installs it"),
]  # fmt: skip
KIND = "ray.io/accelerator-type"
RAY = ["hydra/launcher=ray_cluster", "hydra.launcher.ray.remote.num_gpus=0", "hydra.launcher.ray.remote.num_cpus=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """A head that takes no jobs, and two nodes of a core and a GPU on paper each."""
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for gpu in ("A100", "H100"):
        running.add_node(num_cpus=1, num_gpus=1, labels={KIND: gpu})
    try:
        yield running
    finally:
        running.shutdown()


@pytest.fixture
def run(commands, cluster, arguments) -> Callable:
    """Starts the sweep on the cluster, with more knobs."""
    return lambda *more: commands(*arguments(*RAY, *more), RAY_ADDRESS=cluster.address)


def worker_of(job: Path) -> int:
    """The process that works on a job: it holds the lock in the job's folder."""
    lock = job / ".lock"
    inode = f":{lock.stat().st_ino} "
    (line,) = (line for line in Path("/proc/locks").read_text().splitlines() if inode in line and "->" not in line)
    return int(line.split()[4])


def test_nothing_happens(eight_jobs):
    eight_jobs("ray")


def test_a_jobs_process_dies(run, whole, sweep, seen):
    command = run()
    begun(sweep, command)
    os.kill(worker_of(sweep / JOBS[0]), signal.SIGKILL)
    code, _, stderr = ended(command)
    assert code == 0, stderr[-3000:]
    whole()
    seen("a job's process is killed", "ray", "Ray tries the job again; nothing to do")


def test_a_jobs_process_dies_more_often_than_ray_tries(run, whole, sweep, seen):
    command = run("+hydra.launcher.ray.remote.max_retries=0")
    begun(sweep, command)
    os.kill(worker_of(sweep / JOBS[0]), signal.SIGKILL)
    code, _, stderr = ended(command)
    assert code == 1 and "Ray's task for it has ended" in failure_of(sweep / JOBS[0]), stderr[-3000:]
    record = (sweep / JOBS[1] / "metrics.json").stat()
    code, stdout, stderr = ended(run())
    assert code == 0 and "1 done before, 1 failed before" in stdout, stderr[-3000:]
    assert (sweep / JOBS[1] / "metrics.json").stat() == record
    whole()
    seen("it is killed more often than Ray tries", "ray", "the job has failed, with the reason; the others go on")


def test_jobs_go_where_their_formats_run(commands, arguments, cluster, sweep, seen):
    """FP8 takes compute capability 8.9, which of these an H100 has: both jobs wait for it, one after the other."""
    given = [knob for knob in arguments(*RAY) if not knob.startswith(("quant_level=", "infer=openvino"))]
    command = [*given, "hydra.launcher.ray.remote.num_gpus=1", "infer=auto", "quantize=fp8", "quant_level=1,2"]
    process = commands(*command, RAY_ADDRESS=cluster.address)
    most = 0
    while process.poll() is None:
        most = max(most, sum(held(job / ".lock") for job in sweep.glob("quant*") if (job / ".lock").exists()))
        time.sleep(0.1)
    assert ended(process)[0] == 0 and most == 1
    seen("a format that not all GPUs have", "ray", "its jobs go to nodes that do")


def test_a_node_dies_under_a_job(run, whole, cluster, sweep, seen):
    command = run()
    begun(sweep, command)
    lost = sorted(cluster.worker_nodes, key=lambda node: node.node_ip_address)[0]
    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(num_cpus=1, num_gpus=1, labels={KIND: "A100"})
    code, _, stderr = ended(command)
    assert code == 0, stderr[-3000:]
    whole()
    seen("a node dies under a job, and another comes", "ray", "Ray gives the job to another node; nothing to do")


def test_the_command_is_killed_and_given_again(run, whole, commands, arguments, sweep, seen):
    command = run()
    begun(sweep, command)
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    command.communicate()
    code, _, stderr = ended(commands(*arguments()))
    assert code == 0, stderr[-3000:]
    whole()
    seen("the command is killed, and given again without a launcher", "ray", "Ray ends its jobs; they are done again")


def test_two_sweeps_share_a_cache(run, whole, sweep, tmp_path, seen):
    both_end_whole(run(), run(f"hydra.sweep.dir={tmp_path}/other"), sweep, whole)
    seen("two sweeps at once share a cache", "ray", "both tables are right")


def test_no_node_has_the_gpus_that_a_job_asks_for(run, sweep, seen):
    code, _, stderr = ended(run("hydra.launcher.ray.remote.num_gpus=2"))
    assert code == 2, stderr[-3000:]
    assert "asks for 1 CPU, 2 GPU for a job, and no machine of the Ray cluster has so much" in stderr
    assert "it has 0 CPU, 0 GPU; 1 CPU, 1 GPU; ask for less" in stderr
    assert not sweep.exists()
    seen("no node has the GPUs that a job asks for", "ray", "refused at once, with what there is")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it mounts a disk in the place of a folder")
def test_a_node_does_not_share_the_folder(run, cluster, sweep, seen):
    sweep.mkdir()
    script = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster.address}"]
    start += ["--num-cpus=1", '--resources={"apart": 1}']
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(sweep), *start], start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert any("Ray runtime started" in line for line in node.stdout)
        code, _, stderr = ended(run("+hydra.launcher.ray.remote.resources.apart=1"))
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.communicate()
    assert code == 1 and "which was to do a job" in stderr and "let this machine share the folder" in stderr, stderr
    seen("a node does not share the folder", "ray", "no job begins there, and the command says why")


def test_there_is_no_cluster(commands, arguments):
    code, _, stderr = ended(commands(*arguments(*RAY), RAY_ADDRESS="127.0.0.1:9"))
    assert code == 4 and "no Ray cluster runs at" in stderr, stderr[-3000:]


def test_a_local_ray_leaves_the_same(commands, arguments, whole):
    code, _, stderr = ended(commands(*arguments("hydra/launcher=ray_local")))
    assert code == 0, stderr[-3000:]
    whole()
