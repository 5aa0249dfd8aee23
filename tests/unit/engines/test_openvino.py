import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sd_quant.engines import load_engine, openvino
from sd_quant.errors import ArtifactError


def test_it_computes_the_quantized_layer_at_every_batch_size(tiny, samples):
    engine = load_engine("openvino", tiny.path, threads=1)
    assert (engine.name, engine.inputs) == ("openvino", {"x": torch.float16})
    for batch in (1, 3, 5):
        y = engine(x=torch.from_numpy(samples[:batch]))["y"]
        assert y.dtype == torch.float16
        np.testing.assert_allclose(y.numpy(), tiny.expected(samples[:batch]), rtol=2e-3, atol=2e-3)


def test_int8_layers_are_told_from_float_layers(tiny, float_onnx, int8_kernels):
    quantized, plain = openvino.load(tiny.path, threads=1), openvino.load(float_onnx, threads=1)
    assert openvino.int8_layers(quantized) == 1
    assert openvino.int8_layers(plain) == 0
    assert openvino.layer_precisions(plain) == {"FullyConnected": {"f32": 1}}


def test_the_largest_codes_do_not_saturate(largest):
    y = openvino.load(largest.path, threads=1)(x=torch.full((2, 64), 3.96875))["y"]
    np.testing.assert_allclose(y.numpy(), largest.expected(np.full((2, 64), 3.96875)), rtol=1e-3)


@pytest.mark.parametrize("able", [True, False])
def test_bf16_is_taken_where_the_processor_has_it(float_onnx, monkeypatch, caplog, able):
    class Core(openvino.openvino.Core):
        def get_property(self, device, name):
            return ["FP32", "INT8", *(["BF16"] if able else [])]

    monkeypatch.setattr(openvino.openvino, "Core", Core)
    with caplog.at_level("INFO"):
        engine = openvino.load(float_onnx, threads=1, precision="bf16")
    assert engine.settings["INFERENCE_PRECISION_HINT"] == ("bf16" if able else "f32")
    assert ("this processor has no bf16" in caplog.text) == (not able)
    assert openvino.load(float_onnx, threads=1).settings["INFERENCE_PRECISION_HINT"] == "f32"


def test_where_sums_saturate_codes_are_dequantized(tiny, float_onnx, monkeypatch, caplog):
    monkeypatch.setattr(openvino, "saturates", lambda: True)
    with caplog.at_level("INFO"):
        assert openvino.int8_layers(openvino.load(float_onnx, threads=1)) == 0 and not caplog.messages
        engine = openvino.load(tiny.path, threads=1)
    assert openvino.int8_layers(engine) == 0 and openvino.products(engine, tiny.path) == {"y": "FLOAT"}
    assert "no VNNI" in caplog.messages[0]


def test_dequantized_codes_are_computed_for_any_shape(tiny, samples, monkeypatch):
    """With AVX2 alone, kernels for known shapes round wrongly behind an attention; a run's parity shows it there."""
    monkeypatch.setattr(openvino, "saturates", lambda: True)
    engine = openvino.load(tiny.path, threads=1)
    y = engine(x=torch.from_numpy(samples))["y"]
    np.testing.assert_allclose(y.numpy(), tiny.expected(samples), rtol=2e-3, atol=2e-3)
    assert all(port.partial_shape.is_dynamic for port in engine.compiled.inputs)


def test_quantized_convolutions_count_as_int8(tmp_path, int8_kernels):
    constants = {
        "scale": np.array(2.0**-5, np.float16),
        "zero": np.array(0, np.int8),
        "w": np.ones((32, 16, 3, 3), np.int8),
        "w_scale": np.full(32, 2.0**-8, np.float16),
        "w_zero": np.zeros(32, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_int8"]),
        helper.make_node("DequantizeLinear", ["x_int8", "scale", "zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_dq"], axis=0),
        helper.make_node("Conv", ["x_dq", "w_dq"], ["y"], pads=[1, 1, 1, 1]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["B", channels, "H", "W"])
        for name, channels in (("x", 16), ("y", 32))
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "conv", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "c.onnx")
    engine = openvino.load(tmp_path / "c.onnx", threads=1)
    assert openvino.int8_layers(engine) == 1
    assert engine(x=torch.ones(1, 16, 4, 4))["y"][0, 0, 1, 1].item() == 16 * 9 / 2**8


def test_inputs_of_another_dtype_are_cast(tiny, samples):
    engine = openvino.load(tiny.path, threads=1)
    x = torch.from_numpy(samples)
    assert torch.equal(engine(x=x.to(torch.float64))["y"], engine(x=x)["y"])


def test_outputs_survive_the_next_call(tiny, samples):
    engine = openvino.load(tiny.path, threads=1)
    first = engine(x=torch.from_numpy(samples))["y"]
    before = first.clone()
    engine(x=torch.from_numpy(-samples))
    assert torch.equal(first, before) and before.abs().max() > 0


def test_a_shape_that_the_graph_does_not_take_is_refused(tiny):
    with pytest.raises(ValueError, match=r"'x': \(1, 65\)"):
        openvino.load(tiny.path, threads=1)(x=torch.ones(1, 65))


def test_it_is_compiled_for_the_shapes_of_its_calls(tiny, samples, monkeypatch):
    monkeypatch.setattr(openvino, "saturates", lambda: False)
    engine = openvino.load(tiny.path, threads=1)
    for batch in (1, 3, 1, 5):
        engine(x=torch.from_numpy(samples[:batch]))
    assert [shapes[0][0] for shapes in engine.compiled_models] == [1, 5]  # 3 was used longest ago
    kept = engine.compiled_models[((1, 64),)]
    engine(x=torch.from_numpy(samples[:1]))
    assert engine.compiled_models[((1, 64),)] is kept is engine.compiled
    assert all(port.partial_shape.is_static for port in kept.inputs)


def test_after_a_refusal_it_computes_what_it_takes(tiny, samples):
    engine = openvino.load(tiny.path, threads=1)
    with pytest.raises(ValueError, match="tiny|x"):
        engine(x=torch.ones(1, 65))
    np.testing.assert_allclose(
        engine(x=torch.from_numpy(samples))["y"].numpy(), tiny.expected(samples), rtol=2e-3, atol=2e-3
    )


def test_fp8_is_computed_with_dynamic_shapes(tmp_path):
    """With static ones OpenVINO 2026.4 rounds FP8 numbers otherwise where it joins nodes into kernels."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array(0.5, np.float16), "scale"),
        helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["B", 4]) for name in "xy")
    graph = helper.make_graph(nodes, "fp8", [x], [y], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "f.onnx")
    engine = openvino.load(tmp_path / "f.onnx", threads=1)
    for batch in (1, 3):
        assert engine(x=torch.full((batch, 4), 0.49))["y"].shape == (batch, 4)
    assert list(engine.compiled_models) == [()]
    with pytest.raises(ValueError, match=r"'x': \(1, 5\)"):
        engine(x=torch.ones(1, 5))


def test_what_it_cannot_compile_is_an_artifact_error(unknown_operator_onnx):
    with pytest.raises(ArtifactError, match="NoSuchOperator"):
        openvino.load(unknown_operator_onnx)


def test_float_layers_compute_in_fp32(tiny):
    compiled = openvino.load(tiny.path, threads=1).compiled
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_weights_that_are_dequantized_first_are_no_int8_layers(tmp_path):
    """OpenVINO calls such a layer's runtimePrecision i8 too; its kernel multiplies fp32."""
    constants = {
        "w": np.ones((64, 32), np.int8),
        "scale": np.full(32, 2.0**-8, np.float16),
        "zero": np.zeros(32, np.int8),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w_dq"], axis=1),
        helper.make_node("MatMul", ["x", "w_dq"], ["y"], name="linear"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["B", width]) for name, width in (("x", 64), ("y", 32))
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "stored", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "w.onnx")
    engine = openvino.load(tmp_path / "w.onnx", threads=1)
    assert openvino.int8_layers(engine) == 0
    assert openvino.products(engine, tmp_path / "w.onnx")["y"] == "FLOAT"


def test_the_nodes_of_the_file_are_found_in_the_graph_that_runs(tiny, int8_kernels):
    assert openvino.products(openvino.load(tiny.path, threads=1), tiny.path)["y"] == "INT8"


@pytest.mark.parametrize("count", [1, 2])
def test_it_computes_with_torchs_threads(tiny, monkeypatch, count):
    monkeypatch.setattr(openvino, "default_threads", lambda: count)
    assert openvino.load(tiny.path).threads == count
    assert openvino.load(tiny.path, threads=1).threads == 1
