"""Sweeps on a real Slurm of two nodes, and what befalls them."""

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd_quant.places import HOME

from ..sweeping import ALIKE, JOBS, Launcher, ended
from .slurm import Slurm, slurm, why_not

pytestmark = [
    pytest.mark.release, pytest.mark.needs(cores=2, memory_gb=8, files=1000),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]  # fmt: skip

SLURM = ["hydra/launcher=slurm", *(f"hydra.launcher.{knob}" for knob in (
    "gpus_per_node=null", "cpus_per_task=1", "mem_gb=4", "timeout_min=10",
))]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm(Path(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def launcher(cluster) -> Launcher:
    waits = "waiting for another process, which works in", "done before"
    return Launcher("slurm", SLURM, cluster.environment, "it waits for the jobs that still run", waits)


@pytest.fixture(autouse=True)
def nothing_left(cluster) -> Iterator[None]:
    """Jobs end with the test, and its nodes are back."""
    yield
    cluster.run("scancel", "--user=root")
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "the queue to empty")
    for name in cluster.names:
        cluster.kill_node(name)
        cluster.start_node(name)


def job_of(job: str) -> str:
    """The sweep's job that is an element of the array."""
    return JOBS[int(job.rpartition("_")[2])]


@pytest.mark.parametrize("fault", ALIKE)
def test_what_befalls_ray_too(sweep, cluster, seen, fault):
    seen(fault, ALIKE[fault](sweep))
    assert {node for _, node in cluster.jobs().values()} >= set(cluster.names)


def test_a_node_dies_under_a_job(sweep, cluster, seen):
    command = sweep.begun()
    job = cluster.job_on("n2")
    cluster.miss_node("n2")
    cluster.start_node("n2")
    stdout, _ = ended(command)
    assert re.search(r"jobs: \d done, 0 failed, \d running, \d waiting; ", stdout)
    assert cluster.run("scontrol", "show", "job", job).count("Restarts=1") == 1
    sweep.is_whole()
    seen("a node dies under a job, and comes back", "Slurm gives the job to a node again; nothing to do")


def test_a_job_is_cancelled(sweep, cluster, seen):
    command = sweep.begun()
    job = cluster.job_on("n1")
    cluster.run("scancel", job)
    ended(command, 1)
    assert f"Slurm's job {job} ended as CANCELLED on n1" in sweep.failure_of(job_of(job))
    (other,) = set(JOBS) - {job_of(job)}
    sweep.does_the_rest(other)
    seen("scancel of a job", "the job has failed, with the reason; the others go on; the same command does it")


def test_a_job_exceeds_its_memory(sweep, seen):
    ended(sweep.begin("hydra.launcher.mem_gb=null", "hydra.launcher.mem_per_cpu=300M"), 1)
    for job in JOBS:
        assert "raise hydra.launcher.mem_gb" in sweep.failure_of(job)
    sweep.is_whole(sweep.begin())
    seen("a job exceeds its memory", "it has failed, with the reason and the knob; the same command does it")


def test_a_job_exceeds_its_time(sweep, cluster, seen):
    """One that hangs: it is stopped until Slurm ends it."""
    short = "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=1"
    command = sweep.begun(*short, file="quantize.log", text="of 2: quant_level=")
    job = cluster.job_on("n1")
    for process in cluster.processes("n1"):
        if process.info["environ"].get("SLURMD_NODENAME") == "n1":  # the job's, and not the daemon
            process.suspend()
    ended(command, 1)
    assert "raise hydra.launcher.timeout_min" in sweep.failure_of(job_of(job))
    sweep.is_whole(sweep.begin())
    seen("a job hangs beyond timeout_min", "the job has failed, with the reason and the knob; others go on")


def test_a_node_does_not_share_the_folder(sweep, cluster, seen):
    cluster.miss_node("n2")
    cluster.start_node("n2", hiding=sweep.folder)
    _, stderr = ended(sweep.begin(), 1)
    assert stderr.count("do all nodes share this folder?") == 1, stderr[-3000:]
    (job,) = (job for job in JOBS if not (sweep.folder / job / "metrics.json").exists())
    assert "on n2 and wrote nothing" in sweep.failure_of(job)
    seen("a node does not share the folder", "its jobs have failed within seconds, with the reason")


def test_the_disk_of_a_node_is_full(sweep, cluster, tmp_path, seen):
    """The disk is the node's own, where temporary files go."""
    cluster.miss_node("n2")
    local = tmp_path / "local"
    cluster.start_node("n2", hiding=local)
    cluster.environment["TMPDIR"] = str(local)
    try:
        sweep.is_whole(sweep.begin())
    finally:
        del cluster.environment["TMPDIR"]
    seen("a node's own disk is full", "a job does not require it")


def test_two_nodes_do_one_job_and_one_of_them_dies(process, tiny, with_graphs, cluster, tmp_path, seen):
    """An array of the same command, as docs/launchers.md has it: what one node has is what one alone would have."""
    prompts = "infer.prompts=[a rocket,a teapot,a lamp,a boat,a chair,a clock]"
    knobs = [*tiny.knobs, "quant_level=3", "quantize.keep=2", "infer.steps=10", prompts]
    alone = f"hydra.run.dir={tmp_path}/alone", f"cache.dir={with_graphs(tmp_path / 'other')}"
    assert process("quantize.py", *knobs, *alone).returncode == 0
    with_graphs(tmp_path / "cache")
    command = shlex.join([sys.executable, "quantize.py", *knobs, f"cache.dir={tmp_path}/cache"])
    script = f"{command} hydra.run.dir={tmp_path}/node$SLURM_ARRAY_TASK_ID"
    options = "--array=1-2", "--mem=4G", f"--output={tmp_path}/%a.out", f"--chdir={HOME}"
    cluster.run("sbatch", *options, "--wrap", script)
    logs = [tmp_path / f"node{number}" / "quantize.log" for number in (1, 2)]
    made = tmp_path / "cache" / "sensitivities"
    cluster.wait(lambda: all(log.exists() and "sensitivity ..." in log.read_text() for log in logs), "both to measure")
    cluster.wait(lambda: len(list(made.glob("[!.]*"))) > 3, "both to have measured")
    cluster.kill_node("n2")
    cluster.wait((tmp_path / "node1" / "metrics.json").exists, "the other to end", 120)
    for file in ("sensitivity.csv", "layers.csv", *(f"images/quantized/{number:04}.png" for number in range(6))):
        assert (tmp_path / "node1" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
    assert re.search(r"from the cache: [1-9]\d* of \d+ sensitivities", logs[0].read_text()), "what the other made"
    assert not (tmp_path / "node2" / "metrics.json").exists()
    seen("one job on two nodes, one of which dies", "the other goes on; its result is that of one alone")


def test_there_is_no_such_partition(sweep):
    _, stderr = ended(sweep.begin("hydra.launcher.partition=none"), 1)
    assert "invalid partition specified: none" in stderr
    assert not list(sweep.folder.glob("*/metrics.json"))
