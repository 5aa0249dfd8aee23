"""Which engines of a sweep are timed, with which, and which are not: the engines are files, and none is opened."""

import dataclasses
import json
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import onnx
import pytest
import yaml

from sd_quant.cache import Cache
from sd_quant.errors import ArtifactError
from sd_quant.metrics.latency import Rounds
from sd_quant.report import occasions
from sd_quant.report.provenance import machine
from sd_quant.report.record import read_object
from sd_quant.report.timing import TIMING
from sd_quant.stages import occasions as of_engines
from sd_quant.stages import time_sweep
from tests.presets import job

pytestmark = pytest.mark.commit

composed = cache(job)


def graph(path, weights: str):
    """Write a graph; ``weights`` is ``structure`` or ``structure:number``, where the number is that of its weight."""
    path.parent.mkdir(parents=True)
    structure, _, number = weights.partition(":")
    output = onnx.helper.make_tensor_value_info(structure, onnx.TensorProto.FLOAT, [1])
    weight = onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [1], [float(number or 0)])
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [output], [weight]))
    path.write_bytes(model.SerializeToString())


@pytest.fixture
def sweep(tmp_path):
    """``sweep(name=(weights or none, overrides, changes of the record), ...)``: a folder as a sweep's jobs leave it."""

    def write(**jobs):
        image = {"full_precision": {"p50_ms": 50.0, "rest": 0.5}}
        for name, (weights, overrides, changes) in jobs.items():
            folder = tmp_path / name
            for part in ("vae", "clip1", "clip2"):
                graph(folder / "onnx" / part / f"{part}.onnx", part)
            if weights:
                graph(folder / "onnx" / "unet_xl" / "unet_xl.onnx", weights)
            graph(folder / "full_precision" / "onnx" / "unet_xl" / "unet_xl.onnx", "full")
            knobs = composed(*overrides)
            (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(knobs), sort_keys=False))
            record = {
                "status": "done", "denoiser": {"part": "unet_xl"}, "knobs": {"infer": {"engine": knobs.infer.engine}},
                "environment": {"machine": machine()}, "inputs": {"checkpoint": {"sha256": "0123"}},
                "latency": {knobs.infer.engine: {"image": {str(knobs.infer.batch_size): image}}},
            }  # fmt: skip
            (folder / "metrics.json").write_text(json.dumps(record | changes))
            (folder / "layers.csv").touch()
        plan = {"jobs": [{"name": name, "varied": {}} for name in jobs], "command": [], "varied": []}
        timing = dataclasses.asdict(composed().timing)
        (tmp_path / "sweep.json").write_text(json.dumps(plan | {"timing": timing}))
        return tmp_path

    return write


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """The files that are opened; every call takes a millisecond."""
    files = []

    def open_file(path, infer):
        files.append(str(path.relative_to(path.parents[2])) if "full" not in str(path) else "unquantized")
        return SimpleNamespace(close=lambda: None)

    def rounds(checkpoint, engines, infer, timing):
        return Rounds(dict.fromkeys(engines, [1.0] * 5), {}, 0, "narrow", {"others": 0.0, "steal": 0.0})

    checkpoint = SimpleNamespace(family=SimpleNamespace(DENOISER="unet_xl"))
    session = SimpleNamespace(checkpoint=checkpoint, denoiser="unet_xl", parameters={"unet_xl": 10**6})
    monkeypatch.setattr(time_sweep, "cache_of", lambda folder: Cache(tmp_path / "cache"))
    monkeypatch.setattr(time_sweep, "open_unchecked", lambda model: session)
    monkeypatch.setattr(time_sweep, "open_file", open_file)
    monkeypatch.setattr(time_sweep, "denoiser_rounds", rounds)
    return files


def timed(folder) -> tuple[list[list[list[str]]], dict[str, str]]:
    """The names of jobs by block and file, and why others were left out."""
    record = read_object(folder / TIMING)
    blocks = [[subject["jobs"] for subject in block["subjects"]] for block in record["blocks"]]
    return blocks, {each["job"]: each["reason"] for each in record["left_out"]}


def test_graphs_that_differ_in_constants_alone_are_timed_once_and_share_the_figure(sweep, opened):
    """What an image takes beside the denoiser is the first job's; other parts save 0.1 of c's 0.6 alone."""
    image = {"full_precision": {"p50_ms": 70.0, "rest": 0.6}, "quantized": {"p50_ms": 40.0, "rest": 0.5}}
    other = {"latency": {"openvino": {"image": {"1": image}}}}
    folder = sweep(a=("one:1", [], {}), b=("two:1", [], {}), c=("one:2", [], other))
    for _ in range(2):
        time_sweep.time_sweep(folder)
    assert timed(folder) == ([[["a", "c"], ["b"]]], {})
    assert opened.count("onnx/unet_xl/unet_xl.onnx") == 2 and opened.count("unquantized") == 1
    (block,) = read_object(folder / TIMING)["blocks"]
    assert (block["rest"], block["image_ms"]) == (0.5, 50.0)
    assert block["subjects"][0]["saved"] == {"c": pytest.approx(0.1)}


def test_a_timing_is_an_occasion_of_the_same_engines_whatever_their_weights(sweep, opened, monkeypatch):
    """The third timing knows the first two, four hours ago and two."""
    folder = sweep(a=("one:1", [], {}), b=("two:1", [], {}))
    for hour in (0, 2, 4):
        monkeypatch.setattr(occasions.time, "time", lambda hour=hour: 3600.0 * hour)
        time_sweep.time_sweep(folder, again=True)
    (file,) = (folder / "cache/occasions").glob("*.json")
    first, *later = [each["speedups"] for each in occasions.read_history(file)]
    assert later == [first] * 2 and len(first) == 2
    monkeypatch.setattr(occasions, "FEWEST", 2)
    time_sweep.time_sweep(folder, again=True)
    (block,) = read_object(folder / TIMING)["blocks"]
    assert block["rounds"]["between"]["call"] == {"deviation": 0.0, "degrees": 2, "occasions": 3}


@pytest.mark.parametrize(("engines", "budgets"), [(1, 1), (3, 3), (7, 5)])
def test_each_engine_has_a_time_of_its_own_up_to_five(sweep, opened, monkeypatch, engines, budgets):
    monkeypatch.setattr(time_sweep, "denoiser_rounds", given := Mock(side_effect=time_sweep.denoiser_rounds))
    time_sweep.time_sweep(sweep(**{f"job{number}": (f"weights {number}", [], {}) for number in range(engines)}))
    assert [call.args[-1].budget_s for call in given.mock_calls] == [8 * budgets]


@pytest.mark.slow
def test_other_images_are_other_workloads_with_a_reference_of_their_own(sweep, opened, monkeypatch):
    """And with the compiled framework in their rounds, where the job asks for it."""
    image, closed = ("infer.image=examples/sdxl_mini/card/high_contrast.png",), []
    compiled = SimpleNamespace(close=lambda: closed.append("compiled"))
    monkeypatch.setattr(time_sweep, "open_compiled", lambda checkpoint, infer, part: compiled)
    workloads = [
        (), ("infer.batch_size=2",), ("infer.width=192",), image, (*image, "infer.strength=0.3"),
        ("compiled_baseline=true",),
    ]  # fmt: skip
    folder = sweep(**{name: ("one", overrides, {}) for name, overrides in zip("abcdef", workloads, strict=True)})
    time_sweep.time_sweep(folder)
    assert timed(folder) == ([[[name]] for name in "abcdef"], {}) and opened.count("unquantized") == 6
    assert [block["compiled_ms"] for block in read_object(folder / TIMING)["blocks"]] == [None] * 5 + [[1.0] * 5]
    assert closed == ["compiled"]


def test_what_memory_does_not_hold_at_once_is_timed_in_blocks_or_keeps_its_own_figures(sweep, opened, monkeypatch):
    monkeypatch.setattr(time_sweep, "most_at_once", lambda *given: 0 if given[2].batch_size == 4 else 2)
    folder = sweep(a=("a", [], {}), b=("b", [], {}), c=("c", [], {}), d=("d", ["infer.batch_size=4"], {}))
    time_sweep.time_sweep(folder)
    assert timed(folder) == ([[["a"], ["b"]], [["c"]]], {"d": time_sweep.NO_ROOM}) and opened.count("unquantized") == 1


def test_what_cannot_be_timed_here_is_left_out_and_says_why(sweep, opened):
    """But for what torch simulated: that is no engine, and it was warned of when it ran."""
    elsewhere = {"environment": {"machine": {"cpu": "another"}}}
    folder = sweep(
        a=("one", [], {}), elsewhere=("two", [], elsewhere), native=("three", ["infer=torch_native"], {}),
        removed=(None, [], {}), simulated=("four", [], {"simulated": True}),
    )  # fmt: skip
    time_sweep.time_sweep(folder)
    blocks, left_out = timed(folder)
    begins = {name: because[:26] for name, because in left_out.items()}
    assert blocks == [[["a"]]] and begins == {
        "elsewhere": "it ran on another machine ", "native": "torch_native leaves no fil",
        "removed": "its files cannot be read: ",
    }  # fmt: skip
    (folder / "a" / "metrics.json").unlink()
    time_sweep.time_sweep(folder)
    assert timed(folder) == ([], left_out)
    for name in left_out:
        (folder / name / "metrics.json").unlink()
    (folder / TIMING).unlink()
    time_sweep.time_sweep(folder)
    assert not (folder / TIMING).exists(), "no job that can be timed is finished"
    with pytest.raises(ArtifactError, match="give the folder of a sweep"):
        time_sweep.time_sweep(folder / "a")


def test_what_was_timed_stays_until_there_is_better_or_more_is_asked_for(sweep, opened, monkeypatch):
    folder = sweep(a=("one", [], {}))
    for _ in range(2):
        time_sweep.time_sweep(folder)
    assert opened.count("unquantized") == 1
    plan = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(plan | {"timing": {"half_width": 0.01, "budget_s": 60.0}}))
    time_sweep.time_sweep(folder)
    assert opened.count("unquantized") == 2
    monkeypatch.setattr(of_engines, "versions", lambda *names: "openvino" in names)
    time_sweep.time_sweep(folder)
    assert opened.count("unquantized") == 3, "by another version of the runtime"
    before = (folder / TIMING).read_bytes()

    def refuse(path, infer):
        raise ArtifactError("broken")

    with monkeypatch.context() as changed, pytest.raises(ArtifactError, match="broken"):
        changed.setattr(time_sweep, "open_file", refuse)
        time_sweep.time_sweep(folder, again=True)
    assert (folder / TIMING).read_bytes() == before and opened.count("unquantized") == 3
    time_sweep.time_sweep(folder, again=True)
    assert opened.count("unquantized") == 4
