"""The commands on a pipeline that is opened by observation alone; Stable Diffusion 3 stands for any class."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from sd_quant.observed.checkpoint import Observation

from .sweeps import QUICK

pytestmark = pytest.mark.commit

PARTS = ["text_encoder", "text_encoder_2", "transformer", "vae"]


@pytest.fixture(scope="module")
def knobs() -> tuple[str, ...]:
    return "model=diffusers", "model.path=checkpoints/sd3_mini", "model.width=64", "model.height=64"


@pytest.fixture(scope="module")
def done(command, made_once, knobs) -> Path:
    """A folder with a ``run`` in INT8 and its ``cache``."""

    def make(folder: Path) -> None:
        result = command(
            "quantize.py", *knobs, *QUICK, f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/run"
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]

    return made_once("observed", make)


@pytest.mark.nightly
def test_a_pipeline_that_no_file_describes_is_quantized_exported_and_executed(done):
    record = json.loads((done / "run/metrics.json").read_text())
    assert record["simulated"] is False and record["layers"]["quantized"] >= 50
    assert sorted(path.name for path in (done / "run/onnx").iterdir()) == PARTS
    for part in PARTS:
        onnx.checker.check_model(done / f"run/onnx/{part}/{part}.onnx", full_check=True)
    graph = onnx.load(done / "run/onnx/transformer/transformer.onnx")
    codes = [weight for weight in graph.graph.initializer if weight.data_type == onnx.TensorProto.INT8]
    assert len([each for each in codes if len(each.dims) > 1]) >= record["layers"]["quantized"]
    assert {entry.key for entry in graph.metadata_props} >= {"axes", "samples_a_picture"}
    parity = record["parity"]
    assert {*PARTS, "quantized_layers", "transformer_quantized"} <= parity.keys()
    assert parity["quantized_layers"]["count"] == record["layers"]["quantized"]
    assert all(0 <= entry["relative_error"] <= entry["tolerance"] for entry in parity.values())
    (times,) = (each["transformer"]["2"] for name, each in record["latency"].items() if name != "torch")
    assert times["quantized"]["min_ms"] > 0 and times["full_precision"]["min_ms"] > 0


@pytest.mark.nightly
def test_inspect_prints_what_the_run_observed(command, done, knobs, tmp_path):
    """From the cache, in which the run has put it."""
    result = command("-m", "sd_quant", "inspect", *knobs, f"cache.dir={done}/cache", f"hydra.run.dir={tmp_path}/out")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "observed comes from the cache" in result.stdout + result.stderr
    observation = Observation.from_json(json.loads((tmp_path / "out/observed.json").read_text()))
    assert observation.pipeline == "StableDiffusion3Pipeline" and sorted(observation.parts) == PARTS
    assert all(part.rung.cause is None and part.rung.verified for part in observation.parts.values())
    for word in (*PARTS, "SD3Transformer2DModel", "AutoencoderKL", "hidden_states", "excluded: ", "calls within"):
        assert word in result.stdout


@pytest.mark.nightly
def test_a_runs_files_make_images(command, done, tmp_path):
    result = command(
        "infer.py", f"run='{done}/run'", "steps=2", "prompts=[a cat]", "num_warmup_runs=0",
        f"hydra.run.dir={tmp_path}/out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("*.png")
    image = np.asarray(Image.open(path))
    assert image.shape == (64, 64, 3) and image.std() > 5


def test_what_cannot_be_is_refused_before_any_work(command, tmp_path):
    for arguments, sentence in (
        (["model.path=conf"], "expected for diffusers the folder of a diffusers pipeline"),
        (["model.path=checkpoints/sd3_mini", "model.parts=[vae]"], "model.parts is ['vae'], expected []"),
        (["model.path=checkpoints/sd3_mini", "model.width=60"], "model.width is 60, expected a multiple of 8"),
    ):
        result = command("quantize.py", "model=diffusers", *arguments, f"hydra.run.dir={tmp_path}/run")
        assert result.returncode == 2 and sentence in result.stderr.splitlines()[-1], result.stderr[-500:]
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
