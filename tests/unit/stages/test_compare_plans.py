"""ONNX Runtime as the referee of an engine: it finds a plan that computes something else."""

import json

import numpy as np
import pytest
import torch

from sd_quant.config import artifact
from sd_quant.stages import compare_plans
from tests.graphs import product_of_codes, save_graph

pytestmark = pytest.mark.commit


@pytest.fixture
def run(tmp_path):
    """A run of one quantized part, whose plan is a copy of its ONNX file."""
    (tmp_path / "metrics.json").write_text(json.dumps({"knobs": {"infer": {"width": 64, "height": 64}}}))
    weight = np.random.default_rng(0).integers(-127, 128, (64, 32)).astype(np.int8)
    for place in (tmp_path, tmp_path / "full_precision"):
        path = artifact(place, "onnx", "unet_xl")
        path.parent.mkdir(parents=True)
        save_graph(path, *product_of_codes(weight, np.full(32, 2.0**-8, np.float16), 2.0**-5), {"x": ["batch", 64]},
                   {"y": ["batch", 32]})  # fmt: skip
    return tmp_path


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.001, True), (1.1, False), (float("nan"), False)])
def test_a_plan_that_computes_something_else_is_beyond_its_tolerance(run, monkeypatch, factor, passes):
    load = compare_plans.load_engine

    def loaded(name, path):
        engine = load("onnxruntime", artifact(run, "onnx", "unet_xl") if name == "tensorrt" else path)
        return Scaled(engine, factor) if name == "tensorrt" else engine

    monkeypatch.setattr(compare_plans, "load_engine", loaded)
    [entry] = compare_plans.compare(run, "tensorrt")
    assert entry["what"] == "unet_xl with ONNX Runtime"
    assert (entry["relative_error"] <= entry["tolerance"]) is passes


class Scaled:
    def __init__(self, engine, factor: float):
        self.engine, self.factor = engine, factor

    def __call__(self, **inputs) -> dict[str, torch.Tensor]:
        return {name: output * self.factor for name, output in self.engine(**inputs).items()}

    def close(self) -> None:
        self.engine.close()
