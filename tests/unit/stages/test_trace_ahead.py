import dataclasses
import signal
from types import SimpleNamespace

import pytest

from sd_quant.cache import Cache
from sd_quant.stages import export_onnx, trace_ahead
from sd_quant.stages.export_onnx import graph_origin, trace_meanwhile
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.trace_ahead import Tracer, tracer_for
from tests.presets import job

pytestmark = pytest.mark.commit

PART = SimpleNamespace(refused=None)
CHECKPOINT = SimpleNamespace(parts=lambda: dict.fromkeys(("unet", "vae", "clip"), PART))


class Asked(Tracer):
    """A tracer that starts nothing and keeps what it is asked for."""

    def __init__(self):
        super().__init__()
        self.requests, self.ended = [], False

    def trace(self, request):
        self.requests.append(request)

    def end(self):
        self.ended = True


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(trace_ahead, "cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def tracer(monkeypatch, two_cores) -> Asked:
    monkeypatch.setattr(export_onnx, "graph_origin", lambda checkpoint, sha256, part: {"part": part})
    return Asked()


def test_the_denoiser_is_traced_first_and_what_the_cache_has_is_not_traced_again(tracer, tmp_path):
    cache = Cache(tmp_path, 1e9)
    trace_meanwhile(tracer, job().model, CHECKPOINT, "", cache)
    assert not tracer.ended
    for part in ("unet", "vae"):
        made = tmp_path / part
        cache.provide("graph", {"part": part}, made, lambda folder: (folder / "graph.onnx").write_text("x"))
    trace_meanwhile(tracer, job().model, CHECKPOINT, "", cache)
    assert [request["parts"] for request in tracer.requests] == [["unet", "vae", "clip"], ["clip"]]


@pytest.mark.slow
@pytest.mark.parametrize("without", ["cache", "cores", "threads", "parts"])
def test_nothing_is_traced_where_that_gains_nothing(tracer, tmp_path, monkeypatch, without):
    if without == "cores":
        monkeypatch.setattr(trace_ahead, "cores", lambda: 1)
    if without == "threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint = SimpleNamespace(parts=dict) if without == "parts" else CHECKPOINT
    trace_meanwhile(tracer, job().model, checkpoint, "", Cache(None if without == "cache" else tmp_path))
    assert tracer.requests == [] and tracer.ended


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_tracer_starts_before_it_has_work_where_nothing_was_traced_yet_and_ends_with_its_block(
    two_cores, tmp_path, monkeypatch, graphs
):
    kept = dataclasses.replace(job().cache, dir=str(tmp_path))
    for number in range(graphs):
        (tmp_path / "graph" / str(number)).mkdir(parents=True)
    with pytest.raises(RuntimeError), tracer_for(kept) as tracer:
        process = tracer.process
        raise RuntimeError
    assert tracer.process is None
    assert process is None if graphs else process.returncode == -signal.SIGKILL


@pytest.mark.nightly
def test_a_process_leaves_the_graphs_of_its_parts_in_the_cache_and_ends(tmp_path):
    """The real one, with the smallest part of the shipped checkpoint."""
    model, cache = job().model, Cache(tmp_path, 1e9)
    with Tracer() as tracer:
        tracer.trace(request(model, cache))
        assert tracer.busy()
        assert tracer.process.wait(timeout=300) == 0 and not tracer.busy()
    assert cache.holds("graph", graph_origin(open_unchecked(model).checkpoint, "0" * 64, "clip1"))
    assert not cache.holds("graph", graph_origin(open_unchecked(model).checkpoint, "1" * 64, "clip1"))


def request(model, cache: Cache) -> dict:
    place = [str(cache.directory), cache.limit_bytes]
    return {"model": dataclasses.asdict(model), "sha256": "0" * 64, "cache": place, "parts": ["clip1"]}
