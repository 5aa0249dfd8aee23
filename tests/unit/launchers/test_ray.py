"""Which jobs fit on a Ray cluster; a real one stands behind ``tests/cli/cluster``."""

import json
import sys
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from sd_quant.launchers.ray import KIND, has_room, launched, result_of, told, wanted
from sd_quant.report.record import RECORD
from sd_quant.report.summary import FAILURE, SWEEP

pytestmark = pytest.mark.commit

NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 5e9, "object_store_memory": 2e9, "node:10.0.0.1": 1.0, "big": 2.0}


@pytest.mark.parametrize(("remote", "fit"), [
    ({}, True), ({"num_gpus": 1, "num_cpus": 8}, True), ({"num_gpus": 2}, False), ({"num_cpus": 9}, False),
    ({"resources": {"big": 2}}, True), ({"resources": {"small": 1}}, False),
])  # fmt: skip
def test_a_job_fits_where_all_that_it_asks_for_is(remote, fit):
    assert has_room(remote, NODE) is fit


def test_what_is_there_is_told_without_rays_own_marks():
    assert told(NODE) == "8 CPU, 1 GPU, 2 big"
    assert told({}) == "0 CPU, 0 GPU"
    assert told(wanted({"num_gpus": 0.5})) == "1 CPU, 0.5 GPU"


@pytest.mark.parametrize(("name", "theirs", "expected"), [
    ("a", None, None), ("b", None, {KIND: "!in(A100,T4)"}), ("b", {"zone": "x"}, {KIND: "!in(A100,T4)", "zone": "x"}),
    ("b", {KIND: "H100"}, {KIND: "H100"}),
])  # fmt: skip
def test_a_job_is_kept_from_gpus_that_are_too_old_for_it(tmp_path, name, theirs, expected):
    (tmp_path / SWEEP).write_text(json.dumps({"jobs": [{"name": "a"}, {"name": "b"}]}))
    remote = OmegaConf.create({"num_gpus": 1} | ({"label_selector": theirs} if theirs else {}))
    job = SimpleNamespace(hydra=SimpleNamespace(job=SimpleNamespace(num="ab".index(name))))
    found = launched(lambda *given: given, tmp_path, {"b": ["A100", "T4"]}, "context", remote, job, "task", "state")
    assert found[0] == name and found[1][0] == "context" and found[1][2:] == (job, "task", "state")
    assert found[1][1] == {"num_gpus": 1} | ({"label_selector": expected} if expected else {})


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
