"""The commands on a pipeline that is opened by observation alone; Stable Diffusion 3 stands for any class."""

import json
from pathlib import Path

import onnx
import pytest

from sd_quant.observed.checkpoint import Observation
from sd_quant.report.candidates import HIGH_PRECISION
from tests.zoo import write

from .shared import QUICK, pixels, record_of, rows_of

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


@pytest.fixture(scope="module")
def two(done, made_once) -> Path:
    """A folder with a tiny Wan 2.2 and its ``run``: both denoisers in INT8."""

    def make(folder: Path) -> None:
        write("WanPipeline, two denoisers", folder / "model")
        done("quantize.py", *of_two(folder), f"hydra.run.dir={folder}/run")

    return made_once("two_denoisers", make)


def of_two(folder: Path) -> tuple[str, ...]:
    return (
        "model=diffusers", f"model.path={folder}/model", "model.width=64", "model.height=64", *QUICK, "infer.steps=4",
        "model.arguments={num_frames: 5, max_sequence_length: 128}", "quantize.n_steps=4", f"cache.dir={folder}/cache",
    )  # fmt: skip


def test_both_denoisers_of_a_pipeline_are_quantized_exported_and_timed_by_their_calls(two):
    record, names = record_of(two / "run"), ["transformer", "transformer_2"]
    assert record["denoiser"]["calls"] == {"transformer": 2, "transformer_2": 6}  # guided by a call of its own
    assert record["parts"]["transformer_2"]["preset"] == "int8"
    quantized = record["parts"]["transformer_2"]["layers"]["quantized"]
    assert record["layers"]["quantized"] == 2 * quantized == record["executed"]["of"] and quantized >= 20
    parity = record["parity"]
    assert parity["quantized_layers"]["count"] == parity["transformer_2_layers"]["count"] == quantized
    assert {"transformer_quantized", "transformer_2_quantized"} <= parity.keys()
    (times,) = (each for name, each in record["latency"].items() if name != "torch")
    for part in names:
        for folder in ("", "full_precision/"):
            onnx.checker.check_model(two / f"run/{folder}onnx/{part}/{part}.onnx", full_check=True)
        assert record["sizes_bytes"][part]["onnx_quantized"] > 0 and times[part]["1"]["quantized"]["min_ms"] > 0
    assert times["image"]["1"]["speedup"] is not None
    layers = [row["name"] for row in rows_of(two / "run/layers.csv")]
    own = [name for name in layers if ":" not in name]
    assert layers == [*own, *(f"transformer_2:{name}" for name in own)]
    (row,) = rows_of(two / "run/summary.csv")
    assert int(row["denoiser_onnx_bytes"]) == sum(record["sizes_bytes"][part]["onnx_quantized"] for part in names)


def test_one_alone_makes_other_images_and_a_server_and_judge_open_both(done, two, tmp_path):
    """The judge computes what ``modelopt_export`` has written of both, and says so of each."""
    exported = "quantize=fp8", "hand_over=[modelopt_export]", f"hydra.run.dir={tmp_path}/fp8"
    done("quantize.py", *of_two(two), *exported)
    done("quantize.py", *of_two(two), "model.denoiser=transformer_2", f"hydra.run.dir={tmp_path}/alone")
    both, alone, fp8 = (record_of(folder) for folder in (two / "run", tmp_path / "alone", tmp_path / "fp8"))
    assert alone["denoiser"] | {"calls": None} == both["denoiser"] | {"part": "transformer_2", "calls": None}
    assert not alone["parts"] and "value" in alone["sizes_bytes"]["transformer"]["onnx_quantized"]
    assert alone["fidelity"]["psnr"]["mean"] > both["fidelity"]["psnr"]["mean"]
    written, folder = fp8["hand_over"]["modelopt_export"], tmp_path / "fp8/hand_over/modelopt_export"
    for part in ("transformer", "transformer_2"):
        config = json.loads((folder / part / "config.json").read_text())
        assert config["quantization_config"]["quant_algo"] == "FP8"
    assert written["parts"]["transformer_2"]["quantized"] == written["quantized"] > 0
    knobs = [each for each in of_two(two) if not each.startswith(("calib_size", "quant", "memory_of", "export_trt"))]
    done("judge.py", *knobs, f"candidates=[{folder}]", f"hydra.run.dir={tmp_path}/judged")
    judged = record_of(tmp_path / "judged/modelopt_export")
    formats = dict(judged["judged"]["formats"])
    assert judged["judged"]["parts"].keys() == {"transformer_2"}
    assert judged["judged"]["parts"]["transformer_2"]["formats"] == formats
    assert formats.pop(HIGH_PRECISION) > 0 and sum(formats.values()) == written["quantized"]
    assert judged["fidelity"]["psnr"]["mean"] == pytest.approx(written["fidelity"]["psnr"]["mean"], abs=0.01)


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
