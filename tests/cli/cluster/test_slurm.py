"""Sweeps on a real Slurm of two nodes, and what befalls them."""

import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..conftest import REPOSITORY
from .conftest import JOBS, begun, both_end_whole, ended, failure_of
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


@pytest.fixture
def run(commands, cluster, arguments) -> Callable:
    """Starts the sweep through Slurm, with more knobs."""
    return lambda *more: commands(*arguments(*SLURM, *more), **cluster.environment)


@pytest.fixture(autouse=True)
def nothing_left(cluster) -> Iterator[None]:
    """Jobs end with the test, and its nodes are back."""
    yield
    cluster.run("scancel", "--user=root")
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "the queue to empty")
    for name in cluster.names:
        cluster.kill_node(name)
        cluster.start_node(name)


def on_node(cluster: Slurm, name: str) -> str:
    """The job that runs on a node, by its id."""
    return next(job for job, (state, node) in cluster.jobs().items() if state == "RUNNING" and node == name)


def job_of(job: str) -> str:
    """The sweep's job that is an element of the array."""
    return JOBS[int(job.rpartition("_")[2])]


def test_nothing_happens(eight_jobs, cluster):
    eight_jobs("slurm")
    assert {node for _, node in cluster.jobs().values()} == set(cluster.names)


def test_a_node_dies_under_a_job(run, whole, cluster, sweep, seen):
    command = run()
    begun(sweep, command)
    job = on_node(cluster, "n2")
    cluster.kill_node("n2")
    cluster.wait(lambda: "down" in cluster.state_of("n2"), "n2 to be missed")
    cluster.start_node("n2")
    code, stdout, stderr = ended(command)
    assert code == 0, stderr[-3000:]
    assert re.search(r"jobs: \d done, 0 failed, \d running, \d waiting; ", stdout)
    assert cluster.run("scontrol", "show", "job", job).count("Restarts=1") == 1
    whole()
    seen("a node dies under a job, and comes back", "slurm", "Slurm gives the job to a node again; nothing to do")


def test_a_job_is_cancelled(run, whole, cluster, sweep, seen):
    command = run()
    begun(sweep, command)
    job = on_node(cluster, "n1")
    cluster.run("scancel", job)
    code, _, stderr = ended(command)
    assert code == 1 and f"Slurm's job {job} ended as CANCELLED on n1" in failure_of(sweep / job_of(job)), stderr[
        -3000:
    ]
    (other,) = set(JOBS) - {job_of(job)}
    record = (sweep / other / "metrics.json").stat()
    code, stdout, stderr = ended(run())
    assert code == 0 and "1 done before" in stdout, stderr[-3000:]
    assert (sweep / other / "metrics.json").stat() == record
    whole()
    seen("scancel of a job", "slurm", "the job has failed, with the reason; the others go on; the same command does it")


def test_a_job_exceeds_its_memory(run, whole, sweep, seen):
    code, _, stderr = ended(run("hydra.launcher.mem_gb=null", "hydra.launcher.mem_per_cpu=300M"))
    assert code == 1, stderr[-3000:]
    for job in JOBS:
        assert "raise hydra.launcher.mem_gb" in failure_of(sweep / job)
    assert ended(run())[0] == 0
    whole()
    seen(
        "a job exceeds its memory",
        "slurm",
        "the job has failed, with the reason and the knob; the same command does it",
    )


def test_a_job_exceeds_its_time(run, whole, cluster, sweep, seen):
    """One that hangs: it is stopped until Slurm ends it."""
    command = run("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=1")
    begun(sweep, command, "quantize.log", "of 2: quant_level=")
    job = on_node(cluster, "n1")
    for process in cluster.processes():
        if process.started_on == "n1":
            os.kill(process.number, signal.SIGSTOP)
    code, _, stderr = ended(command)
    assert code == 1, stderr[-3000:]
    assert "raise hydra.launcher.timeout_min" in failure_of(sweep / job_of(job))
    assert ended(run())[0] == 0
    whole()
    seen("a job hangs beyond timeout_min", "slurm", "the job has failed, with the reason and the knob; others go on")


def test_the_command_is_killed_and_given_again(run, whole, commands, arguments, sweep, seen):
    command = run()
    begun(sweep, command)
    command.kill()
    code, stdout, stderr = ended(commands(*arguments()))
    assert code == 0, stderr[-3000:]
    assert "waiting for another process, which works in" in stdout and "done before" in stdout
    whole()
    seen("the command is killed, and given again without a launcher", "slurm", "it waits for the jobs that still run")


def test_two_sweeps_share_a_cache(run, commands, arguments, whole, cluster, sweep, tmp_path, seen):
    first = run()
    second = commands(*arguments(*SLURM, f"hydra.sweep.dir={tmp_path}/other"), **cluster.environment)
    both_end_whole(first, second, sweep, whole)
    seen("two sweeps at once share a cache", "slurm", "both tables are right")


def test_a_node_does_not_share_the_folder(run, cluster, sweep, seen):
    cluster.kill_node("n2")
    cluster.wait(lambda: "down" in cluster.state_of("n2"), "n2 to be missed")
    cluster.start_node("n2", hiding=sweep)
    code, _, stderr = ended(run())
    assert code == 1 and stderr.count("do all nodes share this folder?") == 1, stderr[-3000:]
    (job,) = (job for job in JOBS if not (sweep / job / "metrics.json").exists())
    assert "on n2 and wrote nothing" in failure_of(sweep / job)
    seen("a node does not share the folder", "slurm", "its jobs have failed within seconds, with the reason")


def test_the_disk_of_a_node_is_full(run, whole, cluster, tmp_path, seen):
    """The disk is the node's own, where temporary files go."""
    cluster.kill_node("n2")
    cluster.wait(lambda: "down" in cluster.state_of("n2"), "n2 to be missed")
    local = tmp_path / "local"
    cluster.start_node("n2", hiding=local)
    cluster.environment["TMPDIR"] = str(local)
    try:
        code, _, stderr = ended(run())
    finally:
        del cluster.environment["TMPDIR"]
    assert code == 0, stderr[-3000:]
    whole()
    seen("a node's own disk is full", "slurm", "a job does not require it")


def test_jobs_go_where_their_formats_run(commands, arguments, cluster, sweep, seen):
    """FP8 takes compute capability 8.9, and Slurm would give the first job to the first node, with an A100."""
    before = set(cluster.jobs())
    knobs = [knob for knob in arguments(*SLURM) if not knob.startswith(("quant_level=", "infer=openvino"))]
    command = [*knobs, "hydra.launcher.gpus_per_node=1", "infer=auto", "quantize=fp8,int8"]
    code, _, stderr = ended(commands(*command, **cluster.environment))
    assert code == 0, stderr[-3000:]
    fp8, _ = sorted(cluster.jobs().keys() - before, key=int)  # in the order in which they were submitted
    assert cluster.jobs()[fp8][1] == "n2"
    seen("a format that not all GPUs have", "slurm", "its jobs go to nodes that do")


def test_two_nodes_do_one_job_and_one_of_them_dies(process, tiny, with_graphs, cluster, tmp_path, seen):
    """An array of the same command, as docs/launchers.md has it: what one node has is what one alone would have."""
    prompts = "infer.prompts=[a rocket,a teapot,a lamp,a boat,a chair,a clock]"
    knobs = [*tiny.knobs, "quant_level=3", "quantize.keep=2", "infer.steps=10", prompts]
    alone = f"hydra.run.dir={tmp_path}/alone", f"cache.dir={with_graphs(tmp_path / 'other')}"
    assert process("quantize.py", *knobs, *alone).returncode == 0
    with_graphs(tmp_path / "cache")
    command = shlex.join([sys.executable, "quantize.py", *knobs, f"cache.dir={tmp_path}/cache"])
    script = f"{command} hydra.run.dir={tmp_path}/node$SLURM_ARRAY_TASK_ID"
    cluster.run(
        "sbatch", "--array=1-2", "--mem=4G", f"--output={tmp_path}/%a.out", f"--chdir={REPOSITORY}", "--wrap", script
    )
    logs = [tmp_path / f"node{number}" / "quantize.log" for number in (1, 2)]
    made = tmp_path / "cache" / "sensitivities"
    cluster.wait(lambda: all(log.exists() and "sensitivity ..." in log.read_text() for log in logs), "both to measure")
    cluster.wait(lambda: len(list(made.glob("[!.]*"))) > 3, "both to have measured")
    cluster.kill_node("n2")
    cluster.wait((tmp_path / "node1" / "metrics.json").exists, "the other to end", 120)
    for file in ("sensitivity.csv", "layers.csv", *(f"images/quantized/{number:04}.png" for number in range(6))):
        assert (tmp_path / "node1" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
    assert re.search(r" [1-9]\d* of \d+ sensitivities come from the cache", logs[0].read_text()), "what the other made"
    assert not (tmp_path / "node2" / "metrics.json").exists()
    seen("one job on two nodes, one of which dies", "slurm", "the other goes on; its result is that of one alone")


def test_there_is_no_such_partition(run, sweep):
    code, _, stderr = ended(run("hydra.launcher.partition=none"))
    assert code == 1 and "invalid partition specified: none" in stderr
    assert not list(sweep.glob("*/metrics.json"))
