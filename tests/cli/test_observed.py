"""The commands on a pipeline that is opened by observation alone; Stable Diffusion 3 stands for any class."""

import json
from pathlib import Path

import onnx
import pytest

from sd_quant.observed.checkpoint import Observation

from .shared import QUICK, pixels, record_of

pytestmark = pytest.mark.nightly

PARTS = ["text_encoder", "text_encoder_2", "transformer", "vae"]
KNOBS = "model=diffusers", "model.path=checkpoints/sd3_mini", "model.width=64", "model.height=64"


@pytest.fixture(scope="module")
def observed(done, made_once) -> Path:
    """A folder with a ``run`` in INT8 and its ``cache``."""

    def make(folder: Path) -> None:
        done("quantize.py", *KNOBS, *QUICK, f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run")

    return made_once("observed", make)


def test_a_pipeline_that_no_file_describes_is_quantized_exported_and_executed(observed):
    record = record_of(observed / "run")
    assert record["simulated"] is False and record["layers"]["quantized"] >= 50
    assert sorted(path.name for path in (observed / "run/onnx").iterdir()) == PARTS
    for part in PARTS:
        onnx.checker.check_model(observed / f"run/onnx/{part}/{part}.onnx", full_check=True)
    graph = onnx.load(observed / "run/onnx/transformer/transformer.onnx")
    codes = [weight for weight in graph.graph.initializer if weight.data_type == onnx.TensorProto.INT8]
    assert len([each for each in codes if len(each.dims) > 1]) >= record["layers"]["quantized"]
    assert {entry.key for entry in graph.metadata_props} >= {"axes", "samples_a_picture"}
    parity = record["parity"]
    assert {*PARTS, "quantized_layers", "transformer_quantized"} <= parity.keys()
    assert parity["quantized_layers"]["count"] == record["layers"]["quantized"]
    assert all(0 <= entry["relative_error"] <= entry["tolerance"] for entry in parity.values())
    (times,) = (each["transformer"]["2"] for name, each in record["latency"].items() if name != "torch")
    assert times["quantized"]["min_ms"] > 0 and times["full_precision"]["min_ms"] > 0


def test_inspect_prints_what_the_run_observed(done, observed, tmp_path):
    """From the cache, in which the run has put it."""
    where = f"cache.dir={observed}/cache", f"hydra.run.dir={tmp_path}/out"
    result = done("-m", "sd_quant", "inspect", *KNOBS, *where)
    assert "from the cache: observed" in result.stdout + result.stderr
    observation = Observation.from_json(json.loads((tmp_path / "out/observed.json").read_text()))
    assert observation.pipeline == "StableDiffusion3Pipeline" and sorted(observation.parts) == PARTS
    assert all(part.rung.cause is None and part.rung.verified for part in observation.parts.values())
    for word in (*PARTS, "SD3Transformer2DModel", "AutoencoderKL", "hidden_states", "excluded: ", "calls within"):
        assert word in result.stdout


def test_a_runs_files_make_images(done, observed, tmp_path):
    given = "steps=2", "prompts=[a cat]", "num_warmup_runs=0"
    done("infer.py", f"run='{observed}/run'", *given, f"hydra.run.dir={tmp_path}/out")
    (path,) = (tmp_path / "out").rglob("*.png")
    image = pixels(path)
    assert image.shape == (64, 64, 3) and image.std() > 5
