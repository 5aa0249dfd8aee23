"""One quantized linear layer as ONNX, with its answer in numpy, and graphs that are none."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.graphs import OUT, WIDTH, Tiny, save_graph, tiny_in


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return tiny_in(tmp_path)


@pytest.fixture
def unknown_operator_onnx(tmp_path: Path) -> Path:
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"], name="culprit")]
    return save_graph(tmp_path / "unknown.onnx", nodes, {}, {"x": ["B", WIDTH]}, {"y": ["B", OUT]})


@pytest.fixture
def samples() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float16)
