"""Layers in graphs of their own: they compute what torch does, and what is not the layer is subtracted."""

from types import SimpleNamespace

import onnx
import pytest
import torch

from sd_quant.engines import load_engine
from sd_quant.inference import timed_layers
from sd_quant.inference.timed_layers import MOST_COPIES, SHORTEST, Alone, measured_seconds
from sd_quant.models.layer_calls import LayerCall
from sd_quant.quantization.arithmetic import Arithmetic

pytestmark = pytest.mark.commit

LINEAR = LayerCall((2, 6, 64), (2, 6, 32), (32, 64), True)
CONV = LayerCall((2, 8, 6, 4), (2, 16, 3, 2), (16, 8, 3, 3), False, ((2, 2), (1, 1), (1, 1), 1))
WAYS = {
    LINEAR: [None, Arithmetic("int8", "int8", True, per_token=True), Arithmetic("int4", None, False, rank=4)],
    CONV: [Arithmetic("int8", "int8", True, shift=True), None],
}


def test_a_small_layer_is_in_its_graph_several_times_and_a_large_one_once():
    large = LayerCall((2, 4096, 640), (2, 4096, 2560), (2560, 640), True)
    assert (Alone(LINEAR, torch.float16).copies, Alone(large, torch.float16).copies) == (MOST_COPIES, 1)


@pytest.mark.slow
@pytest.mark.parametrize("call", WAYS, ids=["linear", "conv"])
def test_a_graph_computes_what_its_module_does(call, tmp_path, monkeypatch):
    alone = Alone(call, torch.float16)
    module, _ = alone.module(), alone.graph  # tracing removes a module's weights
    monkeypatch.setattr(Alone, "module", lambda self, with_layer=True: module)
    alone.write(tmp_path / "layer.onnx", None)
    engine = load_engine("openvino", tmp_path / "layer.onnx")
    inputs = alone.inputs(engine)
    outputs = engine(**inputs)
    module.dtype = torch.float32
    for found, expected in zip(outputs.values(), module(**inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
        assert found.numel() == 1, "the rest of an output is not copied"


@pytest.mark.slow
@pytest.mark.parametrize(("call", "way"), [(call, way) for call, ways in WAYS.items() for way in ways if way])
def test_each_copy_is_quantized(call, way, tmp_path):
    alone = Alone(call, torch.float16)
    alone.write(tmp_path / "layer.onnx", way)
    nodes = [node.op_type for node in onnx.load(tmp_path / "layer.onnx").graph.node]
    quantizers = 0 if way.activation is None else MOST_COPIES
    zeros = MOST_COPIES if way.shift else 0  # each convolution is padded with the code of zero
    assert nodes.count("QuantizeLinear") == quantizers + zeros
    assert nodes.count("DequantizeLinear") == quantizers + MOST_COPIES  # of weights too
    products = nodes.count("MatMul") + nodes.count("Conv")
    assert products == MOST_COPIES * (3 if way.rank else 1)


def test_what_a_call_takes_beside_the_layer_is_subtracted(monkeypatch):
    times = {"without": 0.5, None: 2.5, WAYS[CONV][0]: 1.5}  # milliseconds
    opened, closed = [], []

    def opens(alone, way, with_layer):
        opened.append(way if with_layer else "without")
        return SimpleNamespace(
            inputs=dict.fromkeys(alone.contract.inputs, torch.float32), device=torch.device("cpu"),
            close=lambda: closed.append(way), __call__=None, name=opened[-1],
        )  # fmt: skip

    def together(calls, warmup, stopping, clocks):
        return SimpleNamespace(samples={name: [times[each.func.name]] * 3 for name, each in calls.items()})

    monkeypatch.setattr(timed_layers, "measure_together", together)
    monkeypatch.setattr(timed_layers, "partial", lambda engine, **inputs: SimpleNamespace(func=engine))
    done = []
    found = measured_seconds({CONV: WAYS[CONV]}, torch.float16, opens, lambda: done.append(1))
    assert found == {(CONV, None): pytest.approx(2e-3 / MOST_COPIES), (CONV, WAYS[CONV][0]): pytest.approx(1e-3 / 4)}
    assert opened == ["without", *WAYS[CONV]] and len(closed) == 3 and done == [1]
    times[None] = 0.4  # by chance, of a layer that is too small to be measured
    assert measured_seconds({CONV: [None]}, torch.float16, opens)[CONV, None] == SHORTEST
