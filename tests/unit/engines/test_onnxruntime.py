import numpy as np
import pytest
from onnx import helper

from sd_quant.engines import onnxruntime
from tests.graphs import product_of_codes, save_graph

pytestmark = pytest.mark.commit


def test_what_it_fuses_multiplies_codes(tmp_path):
    """With scales in fp32; those of this export are fp16, and it dequantizes."""
    nodes, constants = product_of_codes(np.ones((8, 4), np.int8), np.array(0.05, np.float32), 0.05)
    nodes.append(helper.make_node("MatMul", ["x", "w_dq"], ["z"], name="plain"))
    outputs = {"y": ["B", 4], "z": ["B", 4]}
    path = save_graph(tmp_path / "pairs.onnx", nodes, constants, {"x": ["B", 8]}, outputs, np.float32)
    assert onnxruntime.products(onnxruntime.load(path, threads=1), path) == {"product": "INT8", "plain": "FLOAT"}
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.onnx"]
