"""A job that is killed or starved of disk, and then done; ``python -m tests.faults.run`` does it many times over."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import commands
from .job import STAGES, Place, differing, is_temporary, leftovers
from .run import CODES, SPARED, Unbroken, killed_at, resumed, small_disk, starved, tiny, unbroken, whole

pytestmark = pytest.mark.commit


@pytest.fixture(scope="module")
def unbroken_job(tmp_path_factory) -> Iterator[tuple[Place, Unbroken, Path]]:
    """A place on a small disk, what a job has left there, and the graphs that it had in its cache."""
    folder = tmp_path_factory.mktemp("faults")
    try:
        with small_disk(512) as disk:
            place = Place(disk / "job", tiny(folder))
            model = unbroken(place)
            yield place, model, shutil.copytree(place.root / "cache/graph", folder / "graphs")
    except PermissionError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")


@pytest.fixture
def job(unbroken_job) -> tuple[Place, Unbroken]:
    """The place without what the job has left, and that. Graphs lie in the cache: to trace them is most of the job."""
    place, model, graphs = unbroken_job
    place.empty()
    shutil.copytree(graphs, place.root / "cache/graph")
    return place, model


@pytest.mark.nightly
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_killed_and_given_again_leaves_what_an_unbroken_one_leaves(job, sent):
    place, model = job
    assert tuple(model.moments) == STAGES and len(model.artifacts) >= 10
    ended, _ = killed_at(place, "plans", sent)
    assert ended.code in CODES[sent] and ended.stages[-1] == "plans"
    assert whole(place, model.artifacts) == []
    assert sent == signal.SIGKILL or leftovers(place) == []
    assert resumed(place, model.artifacts) == []


@pytest.mark.nightly
def test_a_job_that_is_starved_and_given_again_leaves_what_an_unbroken_one_leaves(job):
    place, model = job
    ended, problems = starved(place, "parity", place.root.parent / "filler", SPARED, model.artifacts)
    assert (ended.code, ended.stages[-1], problems) == (4, "parity", [])
    assert resumed(place, model.artifacts) == []


@pytest.mark.nightly
def test_other_commands_that_are_killed_and_given_again_leave_the_same(capsys):
    """``python -m tests.faults.commands`` does it for all of them, and puts them into hard places."""
    assert commands.main(["--kills", "2", "--no-places", "--only", "judge", "hand over"]) == 0
    assert "2 faults, 0 problems" in capsys.readouterr().out


def test_what_differs_is_named(tmp_path):
    """Else the comparisons above show nothing."""
    assert differing({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["a", "b", "c"]
    place = Place(tmp_path, ())
    (place.run / "images").mkdir(parents=True)
    (place.run / "images" / "0000.png").write_bytes(b"half")
    (place.run / "metrics.json").write_text('{"fidelity": {"psnr": 30}, "sizes_bytes": {}, "latency": {}}')
    expected = {"images/0000.png": "another", "metrics.json: fidelity": "another"}
    assert len(whole(place, expected)) == 3  # both differ, and one is new
    assert "a record of a job that was not done" in whole(place, expected | {"layers.csv": "missing"})[-1]
    assert is_temporary(place.run / ".vae.onnx.12.part") and not is_temporary(place.root / "tmp")
