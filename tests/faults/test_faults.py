"""A job that is killed or starved of disk, and then done; ``python -m tests.run faults`` does it many times over."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..run import main
from . import run
from .run import STAGES, Job, Unbroken, leftovers, whole

pytestmark = pytest.mark.commit


@pytest.fixture(scope="module")
def unbroken_job(tmp_path_factory) -> Iterator[tuple[Job, Unbroken, Path]]:
    """A job on a small disk, what it has left there, and the graphs that it had in its cache."""
    folder = tmp_path_factory.mktemp("faults")
    try:
        with run.small_disk(512) as disk:
            job = run.main_job(disk / "job", run.tiny(folder))
            model = run.unbroken(job)
            yield job, model, shutil.copytree(job.root / "cache/graph", folder / "graphs")
    except PermissionError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")


@pytest.fixture
def emptied(unbroken_job) -> tuple[Job, Unbroken]:
    """The job without what it has left, and that. Graphs lie in the cache: to trace them is most of the job."""
    job, model, graphs = unbroken_job
    job.empty()
    shutil.copytree(graphs, job.root / "cache/graph")
    return job, model


@pytest.mark.nightly
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_killed_and_given_again_leaves_what_an_unbroken_one_leaves(emptied, sent):
    job, model = emptied
    assert tuple(model.used) == (*STAGES, "end") and len(model.artifacts) >= 10
    ended, _ = run.disturbed(job, "plans", lambda process: run.strike(process, sent))
    assert ended.code == run.CODES[sent] and ended.stages[-1] == "plans"
    assert whole(job, model.artifacts) == []
    assert sent == signal.SIGKILL or leftovers(job) == []
    assert run.given_again(job, model.artifacts) == []


@pytest.mark.nightly
def test_a_job_that_is_starved_and_given_again_leaves_what_an_unbroken_one_leaves(emptied):
    job, model = emptied
    ended, problems = run.starved(job, "parity", job.root.parent / "filler", run.SPARED, model.artifacts)
    assert (ended.code, ended.stages[-1], problems) == (4, "parity", [])
    assert run.given_again(job, model.artifacts) == []


@pytest.mark.nightly
def test_other_commands_that_are_killed_and_given_again_leave_the_same(capsys):
    """``python -m tests.run faults`` does it for all of them, and puts them into hard places."""
    few = ["--kills", "2", "--cancels", "0", "--disk", "--no-races", "--no-places"]
    assert main(["faults", *few, "--only", "judge", "hand over"]) == 0
    assert "2 faults, 0 problems" in capsys.readouterr().out


def test_what_differs_is_named(tmp_path):
    """Else the comparisons above show nothing."""
    names = ["differs: a", "differs: b", "differs: c"]
    assert run.differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == names
    job = run.main_job(tmp_path, ())
    (job.out / "images").mkdir(parents=True)
    (job.out / "images" / "0000.png").write_bytes(b"half")
    (job.out / "metrics.json").write_text('{"fidelity": {"psnr": 30}, "sizes_bytes": {}, "latency": {}}')
    expected = {"images/0000.png": "another", "metrics.json: fidelity": "another"}
    assert len(whole(job, expected)) == 3  # both differ, and one is new
    assert "a record of a job that was not done" in whole(job, expected | {"layers.csv": "missing"})[-1]
    assert run.is_temporary(job.out / ".vae.onnx.12.part") and not run.is_temporary(job.root / "tmp")
