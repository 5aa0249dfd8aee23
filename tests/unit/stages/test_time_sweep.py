"""Which engines of a sweep are timed, with which, and which are not: the engines are files, and none is opened."""

import dataclasses
import json
from types import SimpleNamespace

import onnx
import pytest
import yaml
from hydra import compose, initialize_config_dir

from sd_quant.cli import job_of
from sd_quant.config import QuantizeJob
from sd_quant.errors import ArtifactError
from sd_quant.metrics.latency import Rounds
from sd_quant.places import CONF
from sd_quant.report.provenance import machine
from sd_quant.report.record import read_object
from sd_quant.report.timing import TIMING
from sd_quant.stages import time_sweep

IMAGE = {"full_precision": {"p50_ms": 50.0, "rest": 0.5}}


def graph(path, weights: bytes):
    path.parent.mkdir(parents=True)
    output = onnx.helper.make_tensor_value_info(weights.decode(), onnx.TensorProto.FLOAT, [1])
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [output])).SerializeToString())


@pytest.fixture
def sweep(tmp_path):
    """``sweep(name=(weights, overrides, changes of the record), ...)``: a folder as a sweep's jobs leave it."""

    def write(**jobs):
        for name, (weights, overrides, changes) in jobs.items():
            folder = tmp_path / name
            for part in ("vae", "clip1", "clip2"):
                graph(folder / "onnx" / part / f"{part}.onnx", part.encode())
            graph(folder / "onnx" / "unet_xl" / "unet_xl.onnx", weights)
            graph(folder / "full_precision" / "onnx" / "unet_xl" / "unet_xl.onnx", b"full")
            with initialize_config_dir(str(CONF), version_base="1.3"):
                job = job_of(QuantizeJob, compose("quantize", overrides))
            knobs = dataclasses.asdict(job)
            (folder / "config.yaml").write_text(yaml.safe_dump(knobs, sort_keys=False))
            record = {
                "status": "done", "denoiser": {"part": "unet_xl"}, "knobs": {"infer": {"engine": job.infer.engine}},
                "environment": {"machine": machine()}, "inputs": {"checkpoint": {"sha256": "0123"}},
                "latency": {job.infer.engine: {"image": {str(job.infer.batch_size): IMAGE}}},
            }  # fmt: skip
            (folder / "metrics.json").write_text(json.dumps(record | changes))
        plan = {"jobs": [{"name": name, "varied": {}} for name in jobs], "command": [], "varied": []}
        (tmp_path / "sweep.json").write_text(json.dumps(plan))
        return tmp_path

    return write


@pytest.fixture
def opened(monkeypatch):
    """The files that are opened; every call takes a millisecond."""
    files = []

    def open_file(path, infer):
        files.append(str(path.relative_to(path.parents[2])) if "full" not in str(path) else "unquantized")
        return SimpleNamespace(close=lambda: None)

    def rounds(checkpoint, engines, infer, timing):
        return Rounds(dict.fromkeys(engines, [1.0] * 5), {}, 0, "narrow", {"others": 0.0, "steal": 0.0})

    monkeypatch.setattr(time_sweep, "open_file", open_file)
    monkeypatch.setattr(time_sweep, "denoiser_rounds", rounds)
    return files


def blocks(folder) -> list[list[list[str]]]:
    return [[subject["jobs"] for subject in block["subjects"]] for block in read_object(folder / TIMING)["blocks"]]


def test_files_that_are_the_same_are_timed_once_and_share_the_figure(sweep, opened):
    folder = sweep(a=(b"one", [], {}), b=(b"two", [], {}), c=(b"one", [], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a", "c"], ["b"]]]
    assert opened.count("onnx/unet_xl/unet_xl.onnx") == 2 and opened.count("unquantized") == 1


def test_other_sizes_and_batches_are_other_workloads_with_a_reference_of_their_own(sweep, opened):
    folder = sweep(a=(b"one", [], {}), b=(b"one", ["infer.batch_size=2"], {}), c=(b"one", ["infer.width=192"], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"]], [["b"]], [["c"]]] and opened.count("unquantized") == 3


def test_images_that_begin_with_images_are_other_workloads(sweep, opened):
    image = ["infer.image=examples/sdxl_mini/card/high_contrast.png"]
    folder = sweep(a=(b"one", [], {}), b=(b"one", image, {}), c=(b"one", [*image, "infer.strength=0.3"], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"]], [["b"]], [["c"]]]


def test_what_memory_does_not_hold_at_once_is_timed_in_blocks(sweep, opened, monkeypatch):
    monkeypatch.setattr(time_sweep, "most_at_once", lambda checkpoint, infer: 2)
    folder = sweep(a=(b"a", [], {}), b=(b"b", [], {}), c=(b"c", [], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"], ["b"]], [["c"]]] and opened.count("unquantized") == 1


def test_what_memory_does_not_hold_beside_the_unquantized_one_keeps_its_own_figures(sweep, opened, monkeypatch):
    monkeypatch.setattr(time_sweep, "most_at_once", lambda checkpoint, infer: 0 if infer.batch_size == 4 else 2)
    folder = sweep(a=(b"a", [], {}), b=(b"b", ["infer.batch_size=4"], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"]]] and opened.count("unquantized") == 1
    assert read_object(folder / TIMING)["left_out"] == [{"job": "b", "reason": time_sweep.NO_ROOM}]


def test_what_an_image_takes_beside_the_denoiser_is_that_of_the_first_job(sweep, opened):
    other = {"full_precision": {"p50_ms": 70.0, "rest": 0.7}}
    folder = sweep(a=(b"a", [], {}), b=(b"b", [], {"latency": {"openvino": {"image": {"1": other}}}}))
    time_sweep.time_sweep(folder)
    (block,) = read_object(folder / TIMING)["blocks"]
    assert (block["rest"], block["image_ms"]) == (0.5, 50.0)


def test_memory_holds_fewer_of_larger_models(monkeypatch):
    monkeypatch.setattr(time_sweep, "part_parameters", lambda checkpoint: {"unet_xl": 10**9, "vae": 10**6})
    checkpoint = SimpleNamespace(family=SimpleNamespace(DENOISER="unet_xl"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        infer = job_of(QuantizeJob, compose("quantize")).infer
    found = []
    for gigabytes in (1, 14, 24):
        monkeypatch.setattr(time_sweep, "available_memory_bytes", lambda free=gigabytes: free * 10**9)
        found.append(time_sweep.most_at_once(checkpoint, infer))
    assert found == [0, 2, 6]  # 7.5 GB for the unquantized variant, 2.5 GB for each quantized UNet


@pytest.mark.parametrize(
    ("overrides", "changes", "reason"),
    [
        ([], {"environment": {"machine": {"cpu": "another"}}}, "it ran on another machine"),
        (["infer=torch_native"], {}, "torch_native leaves no file"),
    ],
)
def test_what_cannot_be_timed_here_is_left_out_and_says_why(sweep, opened, overrides, changes, reason):
    folder = sweep(a=(b"one", [], {}), b=(b"two", overrides, changes))
    time_sweep.time_sweep(folder)
    (left_out,) = read_object(folder / TIMING)["left_out"]
    assert blocks(folder) == [[["a"]]] and left_out["job"] == "b" and reason in left_out["reason"]


def test_a_job_without_its_files_is_left_out(sweep, opened):
    folder = sweep(a=(b"one", [], {}), b=(b"two", [], {}))
    (folder / "b" / "onnx" / "unet_xl" / "unet_xl.onnx").unlink()
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"]]]
    assert read_object(folder / TIMING)["left_out"][0]["reason"].startswith("its files cannot be read")


def test_what_was_timed_is_not_timed_again_unless_it_is_for_longer(sweep, opened):
    folder = sweep(a=(b"one", [], {}), b=(b"two", [], {}))
    for _ in range(2):
        time_sweep.time_sweep(folder)
    assert opened.count("unquantized") == 1
    plan = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps(plan | {"timing": {"half_width": 0.01, "budget_s": 60.0}}))
    time_sweep.time_sweep(folder)
    assert opened.count("unquantized") == 2


def test_without_a_finished_job_nothing_is_written(sweep, opened):
    folder = sweep(a=(b"one", [], {}))
    (folder / "a" / "metrics.json").unlink()
    time_sweep.time_sweep(folder)
    assert not (folder / TIMING).exists() and not opened


def test_what_torch_simulated_is_no_engine_and_needs_no_second_warning(sweep, opened):
    folder = sweep(a=(b"one", [], {}), b=(b"two", [], {"simulated": True}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [[["a"]]] and read_object(folder / TIMING)["left_out"] == []


def test_where_nothing_can_be_timed_that_is_said(sweep, opened):
    folder = sweep(a=(b"one", ["infer=torch_native"], {}))
    time_sweep.time_sweep(folder)
    assert blocks(folder) == [] and read_object(folder / TIMING)["left_out"][0]["job"] == "a"


def test_timed_again_what_is_there_stays_until_there_is_better(sweep, opened, monkeypatch):
    folder = sweep(a=(b"one", [], {}))
    time_sweep.time_sweep(folder)
    before = (folder / TIMING).read_bytes()

    def refuse(path, infer):
        raise ArtifactError("broken")

    with monkeypatch.context() as changed, pytest.raises(ArtifactError, match="broken"):
        changed.setattr(time_sweep, "open_file", refuse)
        time_sweep.time_sweep(folder, again=True)
    assert (folder / TIMING).read_bytes() == before and opened.count("unquantized") == 1
    time_sweep.time_sweep(folder, again=True)
    assert opened.count("unquantized") == 2


def test_a_folder_without_a_sweep_is_refused(sweep, opened):
    folder = sweep(a=(b"one", [], {}))
    with pytest.raises(ArtifactError, match="give the folder of a sweep"):
        time_sweep.time_sweep(folder / "a")
    assert not (folder / "a" / TIMING).exists()
