"""What holds of every engine, and what the runtimes on the processor compute of one quantized layer."""

import numpy as np
import pytest
import torch
from onnx import helper

from sd_quant.engines import RUNTIMES, Runtime, load_engine, onnxruntime, openvino
from sd_quant.engines.base import cast_inputs
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from tests.graphs import OUT, WIDTH, Tiny, product_of_codes, save_graph

pytestmark = pytest.mark.commit

MODULES = {"openvino": openvino, "onnxruntime": onnxruntime}
# The last bits of fp16: ONNX Runtime rounds what is dequantized to it, OpenVINO computes in fp32.
TOLERANCES = {"openvino": 2e-3, "onnxruntime": 5e-3}


@pytest.fixture(params=MODULES)
def runtime(request) -> str:
    return request.param


def test_inputs_are_cast_and_ordered_as_declared():
    given = {"b": torch.ones(2, dtype=torch.float64), "a": torch.ones(3, 2).T}
    cast = cast_inputs({"a": torch.float16, "b": torch.int64}, given)
    assert [(name, tensor.dtype) for name, tensor in cast.items()] == [("a", torch.float16), ("b", torch.int64)]
    assert cast["a"].is_contiguous()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 64])
def test_what_is_not_onnx_is_refused_by_every_engine_that_reads_onnx(tmp_path, runtime, content):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="broken.onnx"):
        load_engine(runtime, path)


def test_a_missing_file_is_an_artifact_error(tmp_path):
    for name in (name for name, runtime in RUNTIMES.items() if runtime.load):
        with pytest.raises(ArtifactError, match="nowhere"):
            load_engine(name, tmp_path / "nowhere")


def test_unknown_engine_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean openvino"):
        load_engine("open_vino", tmp_path)


def test_a_runtime_that_is_not_installed_names_its_extra(tmp_path, monkeypatch):
    row = Runtime("not_there", "onnx", "cpu", "not_there", "not_there", load="sd_quant.engines.not_there:load")
    monkeypatch.setitem(RUNTIMES, "not_there", row)
    with pytest.raises(ResourceError, match=r"sd-quant\[not_there\]"):
        load_engine("not_there", tmp_path)


def test_it_computes_the_quantized_layer_at_every_batch_size(tiny, samples, runtime):
    """Also after a shape that the graph does not take."""
    engine = load_engine(runtime, tiny.path, threads=1)
    assert (engine.name, engine.inputs) == (runtime, {"x": torch.float16})
    with pytest.raises(ValueError, match=r"'x': \(1, 65\)"):
        engine(x=torch.ones(1, 65))
    for batch in (1, 3, 5):
        y = engine(x=torch.from_numpy(samples[:batch]))["y"]
        assert y.dtype == torch.float16
        expected = tiny.expected(samples[:batch])
        np.testing.assert_allclose(y.numpy(), expected, rtol=2e-3, atol=TOLERANCES[runtime])


def test_the_largest_codes_do_not_saturate(tmp_path, runtime):
    """A sum of two products of them needs more than 16 bits."""
    largest = Tiny(tmp_path / "x.onnx", np.full((WIDTH, OUT), 127, np.int8), np.full(OUT, 2.0**-8, np.float16)).write()
    y = load_engine(runtime, largest.path, threads=1)(x=torch.full((2, WIDTH), 3.96875))["y"]
    np.testing.assert_allclose(y.numpy(), largest.expected(np.full((2, WIDTH), 3.96875)), rtol=1e-3)


def test_outputs_survive_the_next_call_and_the_engine(tiny, samples, runtime):
    engine = load_engine(runtime, tiny.path, threads=1)
    first = engine(x=torch.from_numpy(samples))["y"]
    before = first.clone()
    engine(x=torch.from_numpy(-samples))
    engine.close()
    assert torch.equal(first, before) and before.abs().max() > 0


def test_opened_again_it_computes_the_same_with_the_same_kernels(tiny, samples, runtime):
    engine, products = MODULES[runtime].load(tiny.path, threads=1), MODULES[runtime].products
    x = torch.from_numpy(samples)
    before, kernels = engine(x=x)["y"], products(engine, tiny.path)
    for _ in range(2):
        assert engine.reopen() and torch.equal(engine(x=x)["y"], before)
    assert products(engine, tiny.path) == kernels and engine(x=x[:1])["y"].shape == before[:1].shape


def test_what_it_cannot_load_is_an_artifact_error(unknown_operator_onnx, runtime):
    with pytest.raises(ArtifactError, match="NoSuchOperator"):
        load_engine(runtime, unknown_operator_onnx)


@pytest.mark.parametrize("count", [1, 2])
def test_it_computes_with_torchs_threads(tiny, monkeypatch, runtime, count):
    monkeypatch.setattr(MODULES[runtime], "default_threads", lambda: count)
    assert load_engine(runtime, tiny.path).threads == count
    assert load_engine(runtime, tiny.path, threads=1).threads == 1


def test_what_onnx_runtime_fuses_multiplies_codes(tmp_path):
    """With scales in fp32; those of this export are fp16, and it dequantizes."""
    nodes, constants = product_of_codes(np.ones((8, 4), np.int8), np.array(0.05, np.float32), 0.05)
    nodes.append(helper.make_node("MatMul", ["x", "w_dq"], ["z"], name="plain"))
    outputs = {"y": ["B", 4], "z": ["B", 4]}
    path = save_graph(tmp_path / "pairs.onnx", nodes, constants, {"x": ["B", 8]}, outputs, np.float32)
    assert onnxruntime.products(onnxruntime.load(path, threads=1), path) == {"product": "INT8", "plain": "FLOAT"}
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.onnx"]
