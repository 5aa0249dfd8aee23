"""The commands on pipelines that are opened by observation alone, of texts and of images; four stand for any class."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from sd_quant.observed.checkpoint import Observation
from sd_quant.report.candidates import HIGH_PRECISION
from tests.zoo import CASES, write

from .shared import QUICK, json_of, onnx_path, pixels, record_of, rows_of

pytestmark = pytest.mark.nightly

PARTS = ["text_encoder", "text_encoder_2", "transformer", "vae"]
SHIPPED, TWO, EDITS, VIDEO = "shipped", "WanPipeline, two denoisers", "FluxKontextPipeline", "WanImageToVideoPipeline"
QUICKLY = [knob for knob in QUICK if not knob.startswith("infer.prompts")]  # which the tables have
TABLES = "model.calibration_table=conf/model/prompts/shapes.csv", "infer.table=conf/model/prompts/shapes_evaluation.csv"
JOBS = {  # what a run in INT8 is told beside the pipeline, which are tiny but for one
    SHIPPED: QUICK,
    TWO: (*QUICK, "infer.steps=4", "quantize.n_steps=4"),
    EDITS: (*TABLES, *QUICKLY, "hand_over=[diffusers_torchao]"),
    VIDEO: (*TABLES, *QUICKLY, "hand_over=[diffusers_torchao]"),
}


def model_of(folder: Path, case: str) -> list[str]:
    """The pipeline in ``folder``, or the shipped one, and the cache there."""
    size = "model.width=64", "model.height=64", f"cache.dir={folder}/cache"
    if case == SHIPPED:
        return ["model=diffusers", "model.path=checkpoints/sd3_mini", *size]
    arguments = ",".join(f"{name}:{json.dumps(value)}" for name, value in CASES[case].arguments.items())
    return ["model=diffusers", f"model.path={folder}/model", f"model.arguments={{{arguments}}}", *size]


@pytest.fixture(scope="module")
def run_of(done, made_once):
    """``run_of(case)``: a folder with the ``model``, a ``run`` of it and its ``cache``."""

    def made(case: str) -> Path:
        def make(folder: Path) -> None:
            if case != SHIPPED:
                write(case, folder / "model")
            done("quantize.py", *model_of(folder, case), *JOBS[case], f"hydra.run.dir={folder}/run")

        return made_once(case.replace(", ", "_"), make)

    return made


def test_a_pipeline_that_no_file_describes_is_quantized_exported_and_executed(run_of):
    run = run_of(SHIPPED) / "run"
    record = record_of(run)
    assert record["simulated"] is False and record["layers"]["quantized"] >= 50
    assert sorted(path.name for path in (run / "onnx").iterdir()) == PARTS
    for part in PARTS:
        onnx.checker.check_model(onnx_path(run, part), full_check=True)
    graph = onnx.load(onnx_path(run, "transformer"))
    codes = [weight for weight in graph.graph.initializer if weight.data_type == onnx.TensorProto.INT8]
    assert len([each for each in codes if len(each.dims) > 1]) >= record["layers"]["quantized"]
    assert {entry.key for entry in graph.metadata_props} >= {"axes", "samples_a_picture"}
    parity = record["parity"]
    assert {*PARTS, "quantized_layers", "transformer_quantized"} <= parity.keys()
    assert parity["quantized_layers"]["count"] == record["layers"]["quantized"]
    assert all(0 <= entry["relative_error"] <= entry["tolerance"] for entry in parity.values())
    (times,) = (each["transformer"]["2"] for name, each in record["latency"].items() if name != "torch")
    assert times["quantized"]["min_ms"] > 0 and times["full_precision"]["min_ms"] > 0


def test_both_denoisers_of_a_pipeline_are_quantized_exported_and_timed_by_their_calls(run_of):
    two, names = run_of(TWO), ["transformer", "transformer_2"]
    record = record_of(two / "run")
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


def test_one_alone_makes_other_images_and_a_server_and_judge_open_both(done, run_of, tmp_path):
    """The judge computes what ``modelopt_export`` has written of both, and says so of each."""
    two = run_of(TWO)
    knobs = *model_of(two, TWO), *JOBS[TWO]
    done("quantize.py", *knobs, "quantize=fp8", "hand_over=[modelopt_export]", f"hydra.run.dir={tmp_path}/fp8")
    done("quantize.py", *knobs, "model.denoiser=transformer_2", f"hydra.run.dir={tmp_path}/alone")
    both, alone, fp8 = (record_of(folder) for folder in (two / "run", tmp_path / "alone", tmp_path / "fp8"))
    assert alone["denoiser"] | {"calls": None} == both["denoiser"] | {"part": "transformer_2", "calls": None}
    assert not alone["parts"] and "value" in alone["sizes_bytes"]["transformer"]["onnx_quantized"]
    assert alone["fidelity"]["psnr"]["mean"] > both["fidelity"]["psnr"]["mean"]
    written, folder = fp8["hand_over"]["modelopt_export"], tmp_path / "fp8/hand_over/modelopt_export"
    for part in ("transformer", "transformer_2"):
        config = json_of(folder / part / "config.json")
        assert config["quantization_config"]["quant_algo"] == "FP8"
    assert written["parts"]["transformer_2"]["quantized"] == written["quantized"] > 0
    knobs = [each for each in knobs if not each.startswith(("calib_size", "quant", "memory_of", "export_trt"))]
    done("judge.py", *knobs, f"candidates=[{folder}]", f"hydra.run.dir={tmp_path}/judged")
    judged = record_of(tmp_path / "judged/modelopt_export")
    formats = dict(judged["judged"]["formats"])
    assert judged["judged"]["parts"].keys() == {"transformer_2"}
    assert judged["judged"]["parts"]["transformer_2"]["formats"] == formats
    assert formats.pop(HIGH_PRECISION) > 0 and sum(formats.values()) == written["quantized"]
    assert judged["fidelity"]["psnr"]["mean"] == pytest.approx(written["fidelity"]["psnr"]["mean"], abs=0.01)


def test_inspect_prints_what_the_run_observed(done, run_of, tmp_path):
    """From the cache, in which the run has put it."""
    where = f"hydra.run.dir={tmp_path}/out"
    result = done("-m", "sd_quant", "inspect", *model_of(run_of(SHIPPED), SHIPPED), where)
    assert "from the cache: observed" in result.stdout + result.stderr
    observation = Observation.from_json(json_of(tmp_path / "out/observed.json"))
    assert observation.pipeline == "StableDiffusion3Pipeline" and sorted(observation.parts) == PARTS
    assert all(part.rung.cause is None and part.rung.verified for part in observation.parts.values())
    for word in (*PARTS, "SD3Transformer2DModel", "AutoencoderKL", "hidden_states", "excluded: ", "calls within"):
        assert word in result.stdout


@pytest.mark.parametrize("case", [EDITS, VIDEO])
def test_a_job_of_tables_reads_an_image_a_row_and_its_files_and_a_judge_make_the_same(done, run_of, case, tmp_path):
    run = run_of(case) / "run"
    record = record_of(run)
    assert record["simulated"] is False and record["prompts"][0] == "make it yellow"
    assert {"infer.table", "infer.table 1 image", "model.calibration_table 16 image"} <= record["inputs"].keys()
    parts = {path.name for path in (run / "onnx").iterdir()}
    assert {"transformer", "vae", "vae_encoder"} <= parts and ("image_encoder" in parts) == (case == VIDEO)
    assert record["hand_over"]["diffusers_torchao"]["fidelity"]["psnr"]["mean"] > 20
    done("infer.py", f"run='{run}'", TABLES[1], "steps=2", "num_warmup_runs=0", f"hydra.run.dir={tmp_path}/out")
    again, before = tmp_path / "out/images/0000.png", run / "images/quantized/0000.png"
    assert np.array_equal(pixels(again), pixels(before)) and pixels(again).std() > 5
    candidates = f"candidates=['{run}']", TABLES[1], "infer.steps=2"
    done("judge.py", *model_of(run.parent, case), *candidates, f"hydra.run.dir={tmp_path}/judged")
    judged = record_of(tmp_path / "judged/run")["fidelity"]["psnr"]["mean"]
    assert judged == pytest.approx(record["fidelity"]["psnr"]["mean"], abs=1.0), "the same assignment, another engine"


@pytest.mark.parametrize(("knobs", "sentence"), [
    (TABLES[:1], "infer.table is null, expected a table, because model.calibration_table is one"),
    ((*TABLES, "infer.prompts=[a cat]"), "infer.prompts was given and changes nothing, because infer.table has"),
    ((*TABLES, "infer.num_prompts=2"), "infer.num_prompts is 2, expected null, because infer.table has the calls"),
])  # fmt: skip
def test_a_table_alone_and_prompts_beside_one_are_refused(run_of, refused, tmp_path, knobs, sentence):
    given = *model_of(run_of(EDITS), EDITS), *knobs, *QUICKLY, f"hydra.run.dir={tmp_path}/out"
    assert sentence in refused("quantize.py", *given)
