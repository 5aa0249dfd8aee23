import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from sd_quant.engines import openvino
from sd_quant.errors import ArtifactError
from tests.graphs import OUT, WIDTH, product_of_codes, save_graph

pytestmark = pytest.mark.commit


@pytest.fixture
def float_onnx(tmp_path):
    nodes, constants = [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((WIDTH, OUT), np.float16)}
    return save_graph(tmp_path / "float.onnx", nodes, constants, {"x": ["B", WIDTH]}, {"y": ["B", OUT]})


@pytest.mark.parametrize("able", [True, False])
def test_bf16_is_taken_where_the_processor_has_it(float_onnx, monkeypatch, caplog, able):
    real = openvino.core()

    class Core:
        def __getattr__(self, name):
            return getattr(real, name)

        def get_property(self, device, name):
            return ["FP32", "INT8", *(["BF16"] if able else [])]

    monkeypatch.setattr(openvino, "core", Core)
    with caplog.at_level("INFO"):
        engine = openvino.load(float_onnx, threads=1, precision="bf16")
    assert engine.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == ("bf16" if able else "f32")
    assert ("this processor has no bf16" in caplog.text) == (not able)
    plain = openvino.load(float_onnx, threads=1)
    assert plain.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    assert plain.compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert [precision for precision, _ in openvino.arithmetic_layers(plain)] == ["f32"]


HEARS_A_SIGNAL = """
import signal, sys, time
from pathlib import Path
from sd_quant.engines import openvino
engines = [openvino.load(Path(sys.argv[1]), threads=1) for _ in range(2)]
for engine in engines:
    engine.compiled
while engines:  # the first one first
    engines.pop(0).close()
signal.signal(signal.SIGALRM, lambda *_: sys.exit(5))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(200)
"""


@pytest.mark.slow
def test_a_signal_is_handled_when_engines_have_come_and_gone(float_onnx):
    """A processor with AMX shows it: with a core for each engine the signal ended the process by SIGSEGV."""
    assert subprocess.run([sys.executable, "-c", HEARS_A_SIGNAL, str(float_onnx)], timeout=200).returncode == 5


def test_where_sums_saturate_codes_are_dequantized_and_computed_for_any_shape(
    tiny, samples, float_onnx, monkeypatch, caplog
):
    """With AVX2 alone, kernels for known shapes round wrongly behind an attention; a run's parity shows it there."""
    monkeypatch.setattr(openvino, "saturates", lambda: True)
    with caplog.at_level("INFO"):
        assert openvino.int8_layers(openvino.load(float_onnx, threads=1)) == 0 and not caplog.messages
        engine = openvino.load(tiny.path, threads=1)
    assert openvino.int8_layers(engine) == 0 and openvino.products(engine, tiny.path) == {"y": "FLOAT"}
    assert "no VNNI" in caplog.messages[0]
    y = engine(x=torch.from_numpy(samples))["y"]
    np.testing.assert_allclose(y.numpy(), tiny.expected(samples), rtol=2e-3, atol=2e-3)
    assert all(port.partial_shape.is_dynamic for port in engine.compiled.inputs)


def test_products_of_dequantized_codes_are_no_int8_layers_and_keep_the_files_names(tmp_path, monkeypatch):
    """OpenVINO calls such a layer's runtimePrecision i8 too; its kernel multiplies fp32."""
    nodes, constants = product_of_codes(np.ones((WIDTH, OUT), np.int8), np.full(OUT, 2.0**-8, np.float16), 1)
    weights_alone = [nodes[2], helper.make_node("MatMul", ["x", "w_dq"], ["y"], name="linear")]
    shapes = {"x": ["B", WIDTH]}, {"y": ["B", OUT]}
    path = save_graph(tmp_path / "w.onnx", weights_alone, constants, *shapes)
    engine = openvino.load(path, threads=1)
    assert openvino.int8_layers(engine) == 0 and openvino.products(engine, path)["y"] == "FLOAT"
    monkeypatch.setattr(openvino, "saturates", lambda: True)
    nodes[-1].output[0] = "sums"
    nodes.append(
        helper.make_node("Add", ["sums", "bias"], ["y"])
    )  # in the graph that runs, one node, called as the sum
    path = save_graph(tmp_path / "b.onnx", nodes, constants | {"bias": np.ones(OUT, np.float16)}, *shapes)
    assert openvino.products(openvino.load(path, threads=1), path) == {"product": "FLOAT"}


def test_it_is_compiled_for_the_shapes_of_its_calls_and_opened_again_with_the_same_settings(tiny, samples, monkeypatch):
    monkeypatch.setattr(openvino, "saturates", lambda: False)
    engine = openvino.load(tiny.path, threads=1)
    for batch in (1, 3, 1, 5):
        engine(x=torch.from_numpy(samples[:batch]))
    assert [shapes[0][0] for shapes in engine.compiled_models] == [1, 5]  # 3 was used longest ago
    kept = engine.compiled_models[((1, 64),)]
    engine(x=torch.from_numpy(samples[:1]))
    assert engine.compiled_models[((1, 64),)] is kept is engine.compiled
    assert all(port.partial_shape.is_static for port in kept.inputs)
    assert engine.reopen() and engine.compiled is not kept and list(engine.compiled_models) == [((1, 64),)]
    for name in ("INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"):
        assert engine.compiled.get_property(name) == kept.get_property(name)


def test_a_file_in_bf16_is_computed_in_fp32_from_inputs_and_weights_of_bf16(tmp_path):
    """OpenVINO's own map to numpy has fp16 for bf16, and by itself it computes in bf16 where the processor can."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["rounded"], to=onnx.TensorProto.BFLOAT16),
        helper.make_node("Sub", ["rounded", "large"], ["y"]),
    ]
    constants = {"w": np.ones((2, 2), ml_dtypes.bfloat16), "large": np.array(256, ml_dtypes.bfloat16)}
    shapes = {"x": ["B", 2]}, {"y": ["B", 2]}
    engine = openvino.load(save_graph(tmp_path / "b.onnx", nodes, constants, *shapes, ml_dtypes.bfloat16), threads=1)
    found = engine(x=torch.tensor([[256.0, 0.3]]))["y"]  # the sum is 256 in bf16
    assert engine.inputs == {"x": torch.bfloat16} and found.dtype == torch.bfloat16
    assert torch.equal(found, torch.full((1, 2), 0.3).bfloat16())
    kept = {op.get_type_name() for op in engine.model.get_ops() for port in op.outputs()
            if port.element_type.get_type_name() == "bf16"}  # fmt: skip
    assert kept == {"Parameter", "Constant", "Convert", "Result"}, "else rounding of sums depends on the processor"


def test_an_input_of_another_type_is_refused(tmp_path):
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.FLOAT)]
    path = save_graph(tmp_path / "b.onnx", nodes, {}, {"x": ["B", 4]}, {"y": ["B", 4]}, dtype=np.uint16)
    with pytest.raises(ArtifactError, match="has an input x of type u16, expected one of f16, bf16, f32"):
        openvino.load(path, threads=1)


def test_fp8_is_computed_with_dynamic_shapes(tmp_path):
    """With static ones OpenVINO 2026.4 rounds FP8 numbers otherwise where it joins nodes into kernels."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]),
    ]
    constants = {"scale": np.array(0.5, np.float16), "zero": np.array(0, ml_dtypes.float8_e4m3fn)}
    path = save_graph(tmp_path / "f.onnx", nodes, constants, {"x": ["B", 4]}, {"y": ["B", 4]})
    engine = openvino.load(path, threads=1)
    for batch in (1, 3):
        assert engine(x=torch.full((batch, 4), 0.49))["y"].shape == (batch, 4)
    assert list(engine.compiled_models) == [()]
    with pytest.raises(ValueError, match=r"'x': \(1, 5\)"):
        engine(x=torch.ones(1, 5))
