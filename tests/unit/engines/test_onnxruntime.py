import numpy as np
import pytest
import torch

from sd_quant.engines import load_engine, onnxruntime
from sd_quant.errors import ArtifactError


def test_it_computes_the_quantized_layer_at_every_batch_size(tiny, samples):
    engine = load_engine("onnxruntime", tiny.path, threads=1)
    assert (engine.name, engine.inputs) == ("onnxruntime", {"x": torch.float16})
    for batch in (1, 3, 5):
        y = engine(x=torch.from_numpy(samples[:batch]))["y"]
        assert y.dtype == torch.float16
        np.testing.assert_allclose(y.numpy(), tiny.expected(samples[:batch]), rtol=2e-3, atol=5e-3)


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
