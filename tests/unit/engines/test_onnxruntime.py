import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sd_quant.engines import load_engine, onnxruntime
from sd_quant.errors import ArtifactError


def test_it_computes_the_quantized_layer_at_every_batch_size(tiny, samples):
    engine = load_engine("onnxruntime", tiny.path, threads=1)
    assert (engine.name, engine.inputs) == ("onnxruntime", {"x": torch.float16})
    for batch in (1, 3, 5):
        y = engine(x=torch.from_numpy(samples[:batch]))["y"]
        assert y.dtype == torch.float16
        np.testing.assert_allclose(y.numpy(), tiny.expected(samples[:batch]), rtol=2e-3, atol=5e-3)


def test_the_largest_codes_do_not_saturate(largest):
    y = onnxruntime.load(largest.path, threads=1)(x=torch.full((2, 64), 3.96875))["y"]
    np.testing.assert_allclose(y.numpy(), largest.expected(np.full((2, 64), 3.96875)), rtol=1e-3)


def test_it_runs_on_exactly_the_cpu_provider(tiny):
    assert onnxruntime.load(tiny.path).session.get_providers() == ["CPUExecutionProvider"]


def test_outputs_survive_the_next_call_and_the_engine(tiny, samples):
    engine = onnxruntime.load(tiny.path, threads=1)
    first = engine(x=torch.from_numpy(samples))["y"]
    before = first.clone()
    engine(x=torch.from_numpy(-samples))
    engine.close()
    assert torch.equal(first, before) and before.abs().max() > 0


def test_a_shape_that_the_graph_does_not_take_is_refused(tiny):
    with pytest.raises(ValueError, match=r"'x': \(1, 65\)"):
        onnxruntime.load(tiny.path, threads=1)(x=torch.ones(1, 65))


def test_what_it_cannot_load_is_an_artifact_error(unknown_operator_onnx):
    with pytest.raises(ArtifactError, match="NoSuchOperator"):
        onnxruntime.load(unknown_operator_onnx)


def test_what_it_fuses_multiplies_codes(tmp_path):
    """With scales in fp32; those of this export are fp16, and it dequantizes."""
    constants = {
        "scale": np.array(0.05, np.float32), "zero": np.array(0, np.int8), "w": np.ones((8, 4), np.int8),
    }  # fmt: skip
    pairs = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_int8"]),
        helper.make_node("DequantizeLinear", ["x_int8", "scale", "zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w_dq"]),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["y"], name="fused"),
        helper.make_node("MatMul", ["x", "w_dq"], ["z"], name="plain"),
    ]
    x, y, z = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", width])
        for name, width in (("x", 8), ("y", 4), ("z", 4))
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(pairs, "pairs", [x], [y, z], initializers)
    path = tmp_path / "pairs.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    products = onnxruntime.products(onnxruntime.load(path, threads=1), path)
    assert products["fused"] == "INT8" and products["plain"] == "FLOAT"
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.onnx"]


@pytest.mark.parametrize("count", [1, 2])
def test_it_computes_with_torchs_threads(tiny, monkeypatch, count):
    monkeypatch.setattr(onnxruntime, "default_threads", lambda: count)
    assert onnxruntime.load(tiny.path).threads == count
    assert onnxruntime.load(tiny.path, threads=1).threads == 1
