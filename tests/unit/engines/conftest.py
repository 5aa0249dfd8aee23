"""One quantized linear layer as ONNX, with its answer in numpy: what the exported UNet is made of."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

WIDTH, OUT = 64, 32


@dataclass(frozen=True)
class Tiny:
    """y [B, 32] fp16 = QDQ(x [B, 64] fp16) @ DQ(int8 weight), scales in fp16, one weight scale per output channel."""

    path: Path
    weight: np.ndarray
    weight_scale: np.ndarray
    scale: float = 2.0**-5

    def expected(self, x: np.ndarray) -> np.ndarray:
        levels = np.clip(np.round(x.astype(np.float32) / self.scale), -128, 127)
        return levels * self.scale @ (self.weight * self.weight_scale.astype(np.float32))


def save(path: Path, nodes: list, initializers: list, **options: object) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["B", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["B", OUT])
    graph = helper.make_graph(nodes, "tiny", [x], [y], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, **options)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """With its weights in a file beside it, as in the exports that are larger than protobuf's 2 GB."""
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (WIDTH, OUT)).astype(np.int8)
    return write(Tiny(tmp_path / "tiny.onnx", weight, (random.random(OUT) * 0.01 + 0.001).astype(np.float16)))


@pytest.fixture
def largest(tmp_path: Path) -> Tiny:
    """All codes of its weight are the largest: a sum of two products needs more than 16 bits."""
    weight_scale = np.full(OUT, 2.0**-8, np.float16)
    return write(Tiny(tmp_path / "largest.onnx", np.full((WIDTH, OUT), 127, np.int8), weight_scale))


def write(tiny: Tiny) -> Tiny:
    constants = {
        "x_scale": np.array(tiny.scale, np.float16),
        "x_zero": np.array(0, np.int8),
        "w_int8": tiny.weight,
        "w_scale": tiny.weight_scale,
        "w_zero": np.zeros(OUT, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_int8"]),
        helper.make_node("DequantizeLinear", ["x_int8", "x_scale", "x_zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w_int8", "w_scale", "w_zero"], ["w_dq"], axis=1),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["y"], name="linear"),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    save(tiny.path, nodes, initializers, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return tiny


@pytest.fixture
def float_onnx(tmp_path: Path) -> Path:
    weight = numpy_helper.from_array(np.ones((WIDTH, OUT), np.float16), "w")
    return save(tmp_path / "float.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [weight])


@pytest.fixture
def unknown_operator_onnx(tmp_path: Path) -> Path:
    return save(tmp_path / "unknown.onnx", [helper.make_node("NoSuchOperator", ["x"], ["y"], name="culprit")], [])


@pytest.fixture
def samples() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float16)
