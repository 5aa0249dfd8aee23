"""A job that is killed, starved of disk and then done; ``python -m tests.faults.run`` does it many times, and more."""

import shutil
import signal

import pytest

from tests.pipelines import TINY

from .job import STAGES, Place, differing, is_temporary
from .run import SPARED, killed_at, resumed, small_disk, starved, unbroken, whole


def test_a_job_that_is_killed_and_starved_leaves_what_an_unbroken_one_leaves(tmp_path):
    TINY["sd15"](tmp_path / "sd15")
    arguments = ("model=sd15", f"model.path={tmp_path}/sd15", "model.width=64", "model.height=64")
    try:
        with small_disk(512) as disk:
            place = Place(disk / "job", arguments)
            model = unbroken(place)
            assert tuple(model.moments) == STAGES and len(model.artifacts) >= 10

            graphs = shutil.copytree(place.root / "cache/graph", tmp_path / "graphs")
            place.empty()
            shutil.copytree(graphs, place.root / "cache/graph")  # to trace them again is most of the job
            ended, _ = killed_at(place, "plans", signal.SIGKILL)
            assert ended.code == -signal.SIGKILL and ended.stages[-1] == "plans"
            assert whole(place, model.artifacts) == []

            ended, problems = starved(place, "parity", disk / "filler", SPARED, model.artifacts)
            assert (ended.code, ended.stages[-1], problems) == (4, "parity", [])
            assert resumed(place, model.artifacts) == []
    except PermissionError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")


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
