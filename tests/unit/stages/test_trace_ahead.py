import dataclasses

import pytest

from sd_quant.cache import Cache
from sd_quant.stages import trace_ahead
from sd_quant.stages.export_onnx import graph_origin
from sd_quant.stages.load import open_model
from sd_quant.stages.trace_ahead import traced_ahead
from tests.presets import job


class Family:
    DENOISER = "unet"


class Checkpoint:
    family = Family

    def parts(self):
        return {"unet": None, "vae": None, "clip": None}


@pytest.fixture
def started(monkeypatch) -> list:
    """What would be traced, by process."""
    processes = []

    class Process:
        def __init__(self, parts):
            self.parts, self.killed = parts, False

        def kill(self):
            self.killed = True

        def wait(self):
            assert self.killed

    def start(model, sha256, cache, parts):
        processes.append(Process(parts))
        return processes[-1]

    monkeypatch.setattr(trace_ahead, "start", start)
    monkeypatch.setattr(trace_ahead, "graph_origin", lambda checkpoint, sha256, part: {"part": part})
    monkeypatch.setattr(trace_ahead, "threads", lambda: 2)
    return processes


def test_the_denoiser_has_a_process_and_the_others_share_one(started, tmp_path):
    with traced_ahead(None, Checkpoint(), "", Cache(tmp_path)):
        assert [process.parts for process in started] == [["unet"], ["vae", "clip"]]
        assert not any(process.killed for process in started)
    assert all(process.killed for process in started)


def test_graphs_that_the_cache_has_are_not_traced_again(started, tmp_path):
    cache = Cache(tmp_path, 1e9)
    for part in ("unet", "vae"):
        made = tmp_path / part
        cache.provide("graph", {"part": part}, made, lambda folder: (folder / "graph.onnx").write_text("x"))
    with traced_ahead(None, Checkpoint(), "", cache):
        assert [process.parts for process in started] == [["clip"]]


@pytest.mark.parametrize("without", ["cache", "threads"])
def test_nothing_is_traced_ahead_where_that_gains_nothing(started, tmp_path, monkeypatch, without):
    if without == "threads":
        monkeypatch.setattr(trace_ahead, "threads", lambda: 1)
    with traced_ahead(None, Checkpoint(), "", Cache(None if without == "cache" else tmp_path)):
        assert started == []


def test_what_fails_in_the_block_ends_the_processes_too(started, tmp_path):
    with pytest.raises(RuntimeError), traced_ahead(None, Checkpoint(), "", Cache(tmp_path)):
        raise RuntimeError
    assert all(process.killed for process in started)


def test_a_process_leaves_the_graphs_of_its_parts_in_the_cache(tmp_path):
    """The real one, with the smallest part of the shipped checkpoint."""
    model, cache = job().model, Cache(tmp_path, 1e9)
    checkpoint = open_model(model)
    process = trace_ahead.start(model, "0" * 64, cache, ["clip1"])
    assert process.wait(timeout=300) == 0
    assert cache.holds("graph", graph_origin(checkpoint, "0" * 64, "clip1"))
    assert not cache.holds("graph", graph_origin(checkpoint, "1" * 64, "clip1"))


def test_a_process_that_fails_leaves_nothing(tmp_path):
    model = dataclasses.replace(job().model, path="no_such.nemo")
    assert trace_ahead.start(model, "0" * 64, Cache(tmp_path, 1e9), ["clip1"]).wait(timeout=300) != 0
    assert not list(tmp_path.rglob("*.onnx"))
