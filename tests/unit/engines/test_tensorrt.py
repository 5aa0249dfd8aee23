"""Plans are built for real (TensorRT for RTX, ahead of time); running one needs the GPU of tests/gpu."""

import ctypes
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from onnx.helper import set_model_props

from sd_quant.engines import load_engine
from sd_quant.engines.tensorrt import build as building
from sd_quant.engines.tensorrt import plan as planning
from sd_quant.engines.tensorrt.run import TensorRtEngine, library_logger, products_in
from sd_quant.errors import ArtifactError, ConfigError, ResourceError, SdQuantError
from sd_quant.files import sha256
from tests.graphs import save_graph, tiny_in
from tests.pasting import AWKWARD, words_of

from ..config.composition import composed

pytestmark = pytest.mark.commit

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

PROFILE = {"x": ((1, 64), (2, 64), (8, 64))}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")


def build(tiny, targets=("SM89",), **options):
    plan = tiny.path.with_suffix(".plan")
    options = {"library": "tensorrt_rtx", "profile": PROFILE, "compute_capabilities": targets} | options
    return plan, building.build_plan(tiny.path, plan, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A plan in a folder, which nobody changes, and its report."""
    return build(tiny_in(tmp_path_factory.mktemp("built")), workspace_gib=1, optimization_level=0)


@pytest.fixture
def plan(built, tmp_path):
    """A copy of the plan and of its record."""
    shutil.copytree(built[0].parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "tiny.plan"


def test_a_profile_has_the_axes_that_a_file_states_for_the_sizes_that_are_asked_for(tmp_path):
    """Of a pipeline that was observed, whose axes nobody knows but the file."""
    inputs = {"x": ["batch", "size_1", 8], "text": ["batch", "text_1", 4], "latents": ["batch", 4, "height", "width"]}
    axes = {"size_1": ["width*height", 1, 256, 5], "text_1": ["", 0, 1, 30], "height": ["height", 1, 16, 0]}
    plain = save_graph(tmp_path / "plain.onnx", [], {}, {"latents": inputs["latents"]}, {})
    model = onnx.load(path := save_graph(tmp_path / "part.onnx", [], {}, inputs, {}))
    set_model_props(model, {"axes": json.dumps(axes), "samples_a_picture": "2"})
    onnx.save(model, path)
    profile = building.profile_of(path, "part", 1, (1, 4), (128, 64), [(256, 256), (64, 64)], guided=True)
    assert profile == {
        "x": ((1, 21, 8), (2, 37, 8), (8, 261, 8)),
        "text": ((1, 30, 4), (2, 30, 4), (8, 30, 4)),
        "latents": ((1, 4, 4, 8), (2, 4, 4, 16), (8, 4, 16, 32)),
    }
    assert building.profile_of(plain, "part", 1, None, (128, 64), guided=True)["latents"] == ((1, 4, 8, 16),) * 3


def test_a_plan_says_in_its_header_what_it_was_built_for_and_its_record_is_the_report(tiny, built):
    targets = ["SM75", "SM80", "SM86", "SM89", "SM120", "SM121"]
    plan, report = build(tiny, targets)
    assert planning.describe_plan(plan) == {
        "is_plan": True, "library": "tensorrt_rtx", "version": trt.__version__, "targets": targets, "complete": True,
        "bytes": plan.stat().st_size,
    }  # fmt: skip
    assert report.targets == targets
    plan, report = built
    assert planning.describe_plan(plan)["targets"] == ["SM89"]
    assert json.loads(planning.record_path(plan).read_text()) == asdict(report)
    assert planning.read_record(plan) == report
    assert report.sha256 == sha256(plan) and report.attention is None
    assert report.onnx == {file: sha256(plan.parent / file) for file in ("tiny.onnx", "weights.bin")}
    assert report.profile == {"x": [[1, 64], [2, 64], [8, 64]]}
    assert report.seconds > 0 and report.bytes == plan.stat().st_size and report.peak_memory_bytes > report.bytes


def test_a_plan_is_rebuilt_by_a_command_that_pastes(tmp_path):
    run = tmp_path / AWKWARD
    (run / "onnx/clip1").mkdir(parents=True)
    (run / "onnx/clip1/clip1.onnx").touch()
    told, _, command = planning.rebuild(run / "plan/clip1.plan").partition(": ")
    assert told == "rebuild it, with the width, height and batches that it is for added to"
    program, name, *knobs = words_of(command, tmp_path / "bin")
    job = composed("export_trt", *knobs)
    assert (program, name, job["files"]["clip1"]) == ("sd-quant", "export_trt", str(run / "onnx/clip1/clip1.onnx"))
    assert job["infer"]["out_path"] == str(run)
    *_, command = planning.rebuild(tmp_path / "clip1.plan").partition(": ")  # of no run
    assert words_of(command, tmp_path / "bin") == ["sd-quant", "export_trt", "--help"]


def test_nvidias_own_tool_is_told_the_shapes_and_the_targets(built, tmp_path):
    """The flags of its documentation; TensorRT 10 is also told that the precision is the graph's."""
    plan, report = built
    assert words_of(planning.own_command(report, Path(AWKWARD), plan), tmp_path) == [
        "tensorrt_rtx", f"--onnx={AWKWARD}", f"--saveEngine={plan}", "--minShapes=x:1x64", "--optShapes=x:2x64",
        "--maxShapes=x:8x64", "--computeCapabilities=89", "--memPoolSize=workspace:1024",
        "--builderOptimizationLevel=0", "--profilingVerbosity=detailed", "--skipInference",
    ]  # fmt: skip
    other = planning.own_command(replace(report, library="tensorrt", version="10.9.0"), Path("a.onnx"), plan)
    assert other.startswith("trtexec ") and " --stronglyTyped " in other
    assert "computeCapabilities" not in other
    assert planning.own_command(replace(report, attention="no kernel"), Path("a.onnx"), plan) is None


@pytest.mark.parametrize("damage", [
    *(lambda content, text=text: text for text in ("", "[" * 100_000, "[]")),
    *(lambda content, wrong=wrong: json.dumps(content | wrong) for wrong in (
        {"sha256": ["a"]}, {"targets": "SM89"}, {"targets": [89]}, {"profile": {"x": [[1, "a"]]}}, {"bytes": True},
        {"stranger": 1},
    )),
    lambda content: json.dumps({"sha256": content["sha256"]}),
])  # fmt: skip
def test_a_record_that_is_none_is_refused(built, plan, damage):
    planning.record_path(plan).write_text(damage(asdict(built[1])))
    with pytest.raises(ArtifactError, match="has no readable record tiny.plan.json of its build"):
        load_engine("tensorrt_rtx", plan)


@pytest.mark.slow
def test_an_interrupted_build_stops_and_leaves_nothing(tiny, monkeypatch):
    """As by Ctrl-C: the signal arrives in the middle of the build, from a step of which it is sent."""
    asked, told = [], []

    class Stopped(threading.Event):
        def is_set(self) -> bool:
            asked.append(None)  # by any of the builder's threads
            if len(asked) == 1:
                os.kill(os.getpid(), signal.SIGINT)  # to the process, whose main thread waits for the build
            told.append(self.wait(10))
            return told[-1]

    monkeypatch.setattr(building, "Event", Stopped)
    with pytest.raises(KeyboardInterrupt):
        build(tiny)
    assert told and all(told), "the build was told to stop"
    assert {file.name for file in tiny.path.parent.iterdir()} == {"tiny.onnx", "weights.bin"}


@pytest.mark.parametrize("said, refusal", [
    ("OutOfMemory: CUDA", ResourceError), ("exception std::bad_alloc", ResourceError), ("no kernel", ArtifactError),
])  # fmt: skip
def test_a_plan_that_is_not_built_for_lack_of_memory_is_no_fault_of_the_graph(tiny, monkeypatch, said, refusal):
    monkeypatch.setattr(building, "_build", lambda *_: library_logger("tensorrt_rtx").errors.append(said))
    with pytest.raises(refusal, match=f"cannot build .*{said}"):
        build(tiny)


@pytest.mark.parametrize("options, error, message", [
    *(({"targets": [name]}, ConfigError, f"cannot build for '{name}'; it builds for SM75.*SM121")
      for name in ("SM90", "sm89", "CURRENT")),
    ({"profile": {}}, ConfigError, "dynamic shape"),
    ({"profile": PROFILE | {"z": PROFILE["x"]}}, ConfigError, r"shapes for \['z'\]"),
    ({"profile": {"x": ((1, 65), (2, 65), (8, 65))}}, ConfigError, "fit"),
    ({"profile": {"x": ((1,), (2,), (8,))}}, ConfigError, "fit"),
    ({"profile": {"x": ((4, 64), (2, 64), (8, 64))}}, ConfigError, "growing"),
    ({"library": "tensorrt"}, (ConfigError, ResourceError), r"builds only for the GPU|sd-quant\[tensorrt\]"),
    pytest.param({"targets": []}, ResourceError, "no NVIDIA GPU", marks=no_gpu),
])  # fmt: skip
def test_what_it_cannot_build_for_is_refused(tiny, options, error, message):
    with pytest.raises(error, match=message):
        build(tiny, **options)


def test_a_graph_that_tensorrt_does_not_take_names_the_node(tiny, unknown_operator_onnx):
    unknown_operator_onnx.rename(tiny.path)
    with pytest.raises(ArtifactError, match=r"node culprit \(NoSuchOperator\)"):
        build(tiny)
    tiny.path.write_bytes(b"hello")  # to TensorRT a network with no layers
    with pytest.raises(ArtifactError, match="tiny.onnx"):
        build(tiny)
    assert not tiny.path.with_suffix(".plan").exists()


def test_a_changed_plan_or_one_of_another_version_is_refused_before_the_runtime_sees_it(built, plan):
    with pytest.raises(ArtifactError, match="a plan of tensorrt_rtx, not of tensorrt;"):
        load_engine("tensorrt", plan)
    whole, record = plan.read_bytes(), planning.record_path(plan)
    for offset in (0, 32, 70, -1):
        changed = bytearray(whole)
        changed[offset] ^= 1
        plan.write_bytes(changed)
        with pytest.raises(ArtifactError, match="damaged or was replaced"):
            load_engine("tensorrt_rtx", plan)
    plan.write_bytes(whole)
    record.write_text(json.dumps(asdict(built[1]) | {"version": "1.0.0.1"}))
    with pytest.raises(ArtifactError, match=r"built by tensorrt_rtx 1\.0\.0\.1.*export_trt"):
        load_engine("tensorrt_rtx", plan)


@no_gpu
def test_a_whole_plan_gets_as_far_as_the_gpu_without_a_record_by_the_callers_word_alone(plan):
    with pytest.raises(ResourceError, match="no NVIDIA GPU .*infer=openvino"):
        load_engine("tensorrt_rtx", plan)
    planning.record_path(plan).unlink()
    with pytest.raises(ArtifactError, match="allow_untrusted_plan"):
        load_engine("tensorrt_rtx", plan)
    with pytest.raises(ResourceError, match="no NVIDIA GPU"):
        load_engine("tensorrt_rtx", plan, allow_untrusted_plan=True)
    whole = plan.read_bytes()
    for content, facts in ((whole[:-1], (True, False)), (b"hello" * 100, (False, None)), (b"", (False, None))):
        plan.write_bytes(content)
        described = planning.describe_plan(plan)
        assert (described["is_plan"], described["complete"]) == facts
        with pytest.raises(ArtifactError, match="not a whole TensorRT plan"):
            load_engine("tensorrt_rtx", plan, allow_untrusted_plan=True)


@pytest.mark.parametrize("fits", [True, False])
def test_times_of_kernels_are_kept_for_the_next_build_on_this_gpu_alone(tmp_path, monkeypatch, caplog, fits):
    """With TensorRT for RTX's own objects, which have the API and measure nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    path = tmp_path / "timing" / building.timing_name("tensorrt", "11.4.0")
    assert path.name == "tensorrt_11.4.0_NVIDIA-H100-80GB-HBM3.timing"
    config = trt.Builder(library_logger("tensorrt_rtx")).create_builder_config()
    building.read_timing_cache(config, path)
    building.write_timing_cache(config, path)
    assert path.read_bytes() and list(path.parent.iterdir()) == [path]

    class Config:
        given: list[bytes] = []

        def create_timing_cache(self, data):
            return data

        def set_timing_cache(self, cache, ignore_mismatch):
            assert not ignore_mismatch
            self.given.append(cache)
            return fits or cache == b""

    path.write_bytes(b"times")
    config = Config()
    config.given = []
    building.read_timing_cache(config, path)
    assert config.given == ([b"times"] if fits else [b"times", b""])
    assert ("times of another GPU" in caplog.text) == (not fits)


def test_the_inspector_tells_codes_from_what_was_dequantized_first():
    """In the inspector's format; a layer that was fused names all the nodes that it was made of."""
    int8, fp8, half = (
        {"Name": "x", "Format/Datatype": f"{words} format"}
        for words in (
            "Thirty-two wide channel vectorized row major Int8",
            "Row major linear FP8",
            "Row major linear FP16",
        )
    )
    names = [["node_conv2d_1", "node_add"], ["node_linear_1"], ["node_linear_2"], []]
    kinds = ("CaskConvolution", [int8]), ("gemm", [fp8]), ("gemm", [half, int8]), ("Constant", [])
    layers = [
        {"Name": kind, "LayerType": kind, "Inputs": given, "Metadata": "\x1e".join(f"[ONNX Layer: {n}]" for n in nodes)}
        for nodes, (kind, given) in zip(names, kinds, strict=True)
    ]  # fmt: skip
    assert products_in(json.dumps({"Layers": layers, "Bindings": ["x"]})) == {
        "node_conv2d_1": "INT8", "node_add": "INT8", "node_linear_1": "FLOAT8E4M3FN", "node_linear_2": "FLOAT",
    }  # fmt: skip
    assert products_in(json.dumps({"Layers": ["conv", "fc"]})) == {}  # of a plan without details


@pytest.fixture
def running(monkeypatch):
    """An engine around mocks that have what TensorRT's own objects have and nothing else, on the processor's memory.

    Its plan takes x [B, 4] fp16, B from 1 to 8, and gives y = 2x; its activations take 100 bytes a sample.
    """
    told = SimpleNamespace(shapes={}, addresses={}, memory=[], streams=[], works=True)

    def set_input_shape(name, shape):
        told.shapes[name] = shape
        return shape[0] <= 8

    def execute(stream):
        told.streams.append(stream)
        size = told.shapes["x"][0] * 4
        x, y = (np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(told.addresses[name])) for name in "xy")
        y.view(np.float16)[:] = 2 * x.view(np.float16)
        return told.works

    context = Mock(spec=trt.IExecutionContext)
    context.set_input_shape.side_effect = set_input_shape
    context.get_tensor_shape.side_effect = lambda name: told.shapes["x"]
    context.set_tensor_address.side_effect = told.addresses.__setitem__
    context.update_device_memory_size_for_shapes.side_effect = lambda: 100 * told.shapes["x"][0]
    context.set_device_memory.side_effect = lambda address, size: told.memory.append(size)
    context.execute_async_v3.side_effect = execute
    plan = Mock(spec=trt.ICudaEngine, num_io_tensors=2)
    plan.create_execution_context.return_value = context
    plan.create_runtime_config.return_value = Mock(spec=trt.IRuntimeConfig)
    plan.get_tensor_name.side_effect = lambda index: "xy"[index]
    plan.get_tensor_dtype.return_value = trt.DataType.HALF
    plan.get_tensor_mode.side_effect = lambda name: trt.TensorIOMode.INPUT if name == "x" else trt.TensorIOMode.OUTPUT
    plan.get_tensor_profile_shape.return_value = (1, 4), (2, 4), (8, 4)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    told.plan = plan
    told.open = lambda: TensorRtEngine("tensorrt_rtx", None, plan, torch.device("cpu"))
    return told


def test_a_plan_runs_on_the_callers_stream_in_memory_for_its_shapes(running):
    engine = running.open()
    config = running.plan.create_runtime_config.return_value
    running.plan.create_execution_context.assert_called_once_with(config)
    managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    config.set_execution_context_allocation_strategy.assert_called_once_with(managed)
    assert config.dynamic_shapes_kernel_specialization_strategy == trt.DynamicShapesKernelSpecializationStrategy.EAGER
    config.set_runtime_cache.assert_called_once_with(config.create_runtime_cache.return_value)
    assert engine.inputs == {"x": torch.float16} and engine.outputs == {"y": torch.float16}
    first = engine(x=torch.full((3, 4), 1.5))["y"]
    x = torch.full((5, 4), 4.0, dtype=torch.float16)
    second = engine(x=x)["y"]
    assert running.addresses["x"] == x.data_ptr()  # what is where it is needed is not copied
    assert first.unique() == 3 and second.unique() == 8  # an answer outlives the next call
    assert running.shapes == {"x": (5, 4)} and running.memory == [300, 500] and running.streams == [7, 7]


def test_a_call_that_is_not_in_the_profile_or_does_not_run_is_refused_with_the_reason(running):
    with pytest.raises(ConfigError, match=r"takes x from \(1, 4\) to \(8, 4\) but was given \(9, 4\); .*trt.sizes"):
        running.open()(x=torch.ones(9, 4))
    assert not running.streams
    library_logger("tensorrt_rtx").errors.append("an illegal memory access")
    running.works = False
    with pytest.raises(SdQuantError, match="could not run the plan: .*an illegal memory access"):
        running.open()(x=torch.ones(1, 4))
    running.plan.create_execution_context.return_value = None
    with pytest.raises(ResourceError, match="no memory to run the plan"):
        running.open()
