"""The rules of every engine, files before a runtime reads them, pools, and recorded calls, without CUDA's recording."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from sd_quant.engines import RUNTIMES, Runtime, load_engine, onnxruntime, openvino, replayed
from sd_quant.engines.onnx_input import onnx_files, structure_of
from sd_quant.engines.pool import Pool, Variant
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from tests.graphs import OUT, WIDTH, Tiny, product_of_codes, save_graph

pytestmark = pytest.mark.commit


MODULES = {"openvino": openvino, "onnxruntime": onnxruntime}


@pytest.fixture(params=MODULES)
def runtime(request) -> str:
    return request.param


@pytest.mark.parametrize(("name", "content", "error", "sentence"), [
    *((name, content, ArtifactError, "broken") for name in MODULES for content in (b"", b"hello", bytes(64))),
    *((name, None, ArtifactError, "broken") for name, row in RUNTIMES.items() if row.load),
    ("open_vino", None, ConfigError, "did you mean openvino"),
    ("not_there", None, ResourceError, r"sd-quant\[not_there\]"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_refused(tmp_path, monkeypatch, name, content, error, sentence):
    row = Runtime("not_there", "onnx", "cpu", "not_there", "not_there", load="sd_quant.engines.not_there:load")
    monkeypatch.setitem(RUNTIMES, "not_there", row)
    if content is not None:
        (tmp_path / "broken").write_bytes(content)
    with pytest.raises(error, match=sentence):
        load_engine(name, tmp_path / "broken")


@pytest.mark.parametrize("name", MODULES)
def test_an_operator_that_it_does_not_know_is_named(unknown_operator_onnx, name):
    with pytest.raises(ArtifactError, match="NoSuchOperator"):
        load_engine(name, unknown_operator_onnx)


def test_it_computes_the_quantized_layer_at_every_batch_size(tiny, samples, runtime, tmp_path, monkeypatch):
    """Also after a shape that the graph does not take. The sum of two products of largest codes needs over 16 bits."""
    engine = load_engine(runtime, tiny.path, threads=1)
    assert (engine.name, engine.inputs, engine.threads) == (runtime, {"x": torch.float16}, 1)
    with pytest.raises(ValueError, match=r"'x': \(1, 65\)"):
        engine(x=torch.ones(1, 65))
    for batch in (1, 3, 5):
        y = engine(x=torch.from_numpy(samples[:batch]))["y"]
        assert y.dtype == torch.float16
        expected, last_bits = tiny.expected(samples[:batch]), 2e-3 if runtime == "openvino" else 5e-3  # fp32 or fp16
        np.testing.assert_allclose(y.numpy(), expected, rtol=2e-3, atol=last_bits)
    before = y.clone()
    engine(x=torch.from_numpy(-samples))
    engine.close()
    assert torch.equal(y, before) and before.abs().max() > 0, "an answer outlives the next call and the engine"

    largest = Tiny(tmp_path / "x.onnx", np.full((WIDTH, OUT), 127, np.int8), np.full(OUT, 2.0**-8, np.float16)).write()
    monkeypatch.setattr(MODULES[runtime], "default_threads", lambda: 2)
    engine = load_engine(runtime, largest.path)
    y = engine(x=torch.full((2, WIDTH), 3.96875))["y"]
    np.testing.assert_allclose(y.numpy(), largest.expected(np.full((2, WIDTH), 3.96875)), rtol=1e-3)
    assert engine.threads == 2, "as torch has"


def test_opened_again_it_computes_the_same_with_the_same_kernels(tiny, samples, runtime):
    engine, products = MODULES[runtime].load(tiny.path, threads=1), MODULES[runtime].products
    x = torch.from_numpy(samples)
    before, kernels = engine(x=x)["y"], products(engine, tiny.path)
    for _ in range(2):
        assert engine.reopen() and torch.equal(engine(x=x)["y"], before)
    assert products(engine, tiny.path) == kernels and engine(x=x[:1])["y"].shape == before[:1].shape


def test_what_onnx_runtime_fuses_multiplies_codes(tmp_path):
    """With scales in fp32; those of this export are fp16, and it dequantizes."""
    nodes, constants = product_of_codes(np.ones((8, 4), np.int8), np.array(0.05, np.float32), 0.05)
    nodes.append(helper.make_node("MatMul", ["x", "w_dq"], ["z"], name="plain"))
    outputs = {"y": ["B", 4], "z": ["B", 4]}
    path = save_graph(tmp_path / "pairs.onnx", nodes, constants, {"x": ["B", 8]}, outputs, np.float32)
    assert onnxruntime.products(onnxruntime.load(path, threads=1), path) == {"product": "INT8", "plain": "FLOAT"}
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.onnx"]


class Doubling:
    """An engine that logs its opening and closing, and doubles at most eight rows."""

    name, inputs, device = "doubling", {"x": torch.float16}, torch.device("cpu")

    def __init__(self, key, log):
        self.key, self.log = key, log
        log.append(f"open {key}")

    def __call__(self, x):
        if x.shape[0] > 8:
            raise ValueError("at most 8")
        return {"y": 2 * x}

    def close(self):
        self.log.append(f"close {self.key}")


@pytest.mark.parametrize("most", [None, 1])
def test_engines_are_opened_on_use_and_where_memory_is_short_one_is_closed_before_the_next(most):
    log = []
    pool = Pool(lambda key: Doubling(key, log), most)
    one, other = Variant(pool, {"unet_xl": "a", "vae": "v"}), Variant(pool, {"unet_xl": "b", "vae": "v"})
    assert (list(one), len(other), log) == (["unet_xl", "vae"], 2, [])
    used = [one["vae"], other["vae"], one["unet_xl"], one["unet_xl"], other["unet_xl"]]
    assert [engine.key for engine in used] == ["v", "v", "a", "a", "b"] and used[0] is used[1] and used[2] is used[3]
    assert log == (["open v", "close v", "open a", "close a", "open b"] if most else ["open v", "open a", "open b"])
    pool.close()
    assert sorted(log[-1 if most else -3 :]) == (["close b"] if most else ["close a", "close b", "close v"])


def test_another_shape_is_recorded_anew_and_what_the_engine_refuses_is_refused(monkeypatch):
    """One recording serves all calls of a shape, and an answer outlives the next call.

    A stand-in for CUDA's graph replays by computing from what the recording reads into what it writes.
    """
    recorded = []

    def record(engine, given):
        static = {name: tensor.clone() for name, tensor in given.items()}
        outputs = engine(**static)

        class Graph:
            def replay(self):
                for name, tensor in engine(**static).items():
                    outputs[name].copy_(tensor)

        recorded.append(static["x"].shape[0])
        return Graph(), static, outputs

    monkeypatch.setattr(replayed, "record", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine = replayed.Replayed(inner := Doubling("", []))
    answers = [engine(x=torch.full((batch, 3), float(batch)))["y"] for batch in (2, 4, 4, 2)]
    assert [(y.shape, y.unique().item()) for y in answers] == [((batch, 3), 2.0 * batch) for batch in (2, 4, 4, 2)]
    assert recorded == [2, 4, 2] and answers[0].dtype == torch.float16
    for given, sentence in (({"x": torch.ones(9, 3)}, "at most 8"), ({"z": torch.ones(2, 3)}, r"inputs \['x'\]")):
        with pytest.raises(ValueError, match=sentence):
            engine(**given)
    assert engine(x=torch.ones(2, 3))["y"].shape == (2, 3)
    engine.close()
    assert inner.log[-1] == "close "


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link", "absent"])
def test_external_weights_outside_the_folder_are_refused(tiny, location):
    """And weights that are missing."""
    (tiny.path.parent / "link").symlink_to("/etc/hostname")
    model = onnx.load(tiny.path, load_external_data=False)
    entry = next(e for t in model.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = location
    tiny.path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="'absent', which is not" if location == "absent" else "outside its own"):
        onnx_files(tiny.path)


@pytest.mark.parametrize(("name", "dims", "entries"), [
    *(("w_int8", dims, {}) for dims in ([2**40, 32], [-64, -32])),
    *(("w_int8", None, {"length": length}) for length in ("1", str(2**40))),
    *(("w_int8", None, {"offset": offset}) for offset in ("1", "-1", "9" * 5000)),
    *(("w_scale", dims, {}) for dims in ([2**40], [2**32, 2**32])),
])  # fmt: skip
def test_weights_that_are_smaller_than_they_claim_are_refused(tiny, name, dims, entries):
    """Runtimes allocate what is claimed: of a file of four kilobytes, terabytes."""
    model = onnx.load(tiny.path, load_external_data=False)
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == name]
    if dims:
        tensor.dims[:] = dims
    for key, value in entries.items():
        entry = next((entry for entry in tensor.external_data if entry.key == key), None) or tensor.external_data.add()
        entry.key, entry.value = key, value
    tiny.path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=f"tiny.onnx claims more numbers for '{name}' than it holds"):
        onnx_files(tiny.path)


def test_a_structure_has_all_but_constants(tmp_path):
    """Zero points are no constants: a shifted input is multiplied by other kernels."""

    def structure(codes=0, scale=0.5, zero_point=0, rows=4, operation="MatMul") -> str:
        tensors = {
            "codes": np.full((rows, 4), codes, np.int8), "scale": np.float16([scale] * 4),
            "zero_point": np.full(4, zero_point, np.int8), "bias": np.full(4, scale, np.float32),
        }  # fmt: skip
        weights = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
        nodes = [helper.make_node(operation, ["x", "codes"], ["y"])]
        model = helper.make_model(helper.make_graph(nodes, "graph", [], [], weights))
        helper.set_model_props(model, {"made": str(codes)})
        (tmp_path / "unet.onnx").write_bytes(model.SerializeToString())
        return structure_of(tmp_path / "unet.onnx")

    assert structure() == structure(codes=7, scale=0.25)
    assert len({structure(), structure(zero_point=3), structure(rows=8), structure(operation="Gemm")}) == 4


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
