"""Recipes and knobs beyond the plain ones, on a tiny pipeline whose statistics and graphs an earlier run has left."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors import safe_open

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.report.run_table import run_table
from tests.zoo.families import sd15_by_ddim

from .conftest import LEVEL_3
from .shared import PROMPTS, images_in, json_of, onnx_path, prompts_knob, record_of, rows_of

pytestmark = pytest.mark.nightly


@pytest.fixture
def range_of(refused, tiny, tmp_path) -> Callable[..., list[int]]:
    """``range_of(knob, pattern, *knobs)``: the numbers with which a knob's value is refused before calibration."""

    def numbers(knob: str, pattern: str, *knobs: str) -> list[int]:
        where = f"cache.dir={tiny.cache}", f"hydra.run.dir={tmp_path}/refused"
        said = refused("quantize.py", *tiny.knobs, *knobs, knob, *where)
        assert "calibrat" not in said
        return [int(number) for number in re.search(pattern, said).groups()]

    return numbers


def test_another_recipe_takes_its_statistics_from_the_cache_and_keeps_what_is_most_sensitive(job, tiny):
    """And of the first prompt alone: of that the run before left a snapshot."""
    entries = {path: path.stat().st_mtime_ns for path in tiny.cache.glob("statistics/*/*.safetensors")}
    run = job("quant_level=2.5", "alpha=auto", "smoothing=modelopt", "keep=2", "calib_size=1")
    assert "from the cache: statistics of prompts 1 to 1" in (run / "quantize.log").read_text()
    assert {path: path.stat().st_mtime_ns for path in tiny.cache.glob("statistics/*/*.safetensors")} == entries

    ranked, record, layers = rows_of(run / "sensitivity.csv"), record_of(run), rows_of(run / "layers.csv")
    errors = [float(row["network_error"]) for row in ranked]
    assert len(ranked) == 2 + record["layers"]["quantized"] and errors == sorted(errors, reverse=True)
    assert (run / "sensitivity.png").stat().st_size
    kept = {row["name"] for row in layers if row["reason"] == "among the most sensitive layers"}
    assert kept == {row["name"] for row in ranked[:2]} == {row["name"] for row in ranked if row["kept"] == "True"}
    searched = [row for row in layers if row["alpha"]]
    gains = [float(row["output_error_alpha_0.8"]) - float(row["output_error"]) for row in searched]
    assert len({row["alpha"] for row in searched}) > 1 and sum(gains) > 0
    assert record["smoothing"]["multiplications"] == len(searched) > 4


def test_a_budget_gives_bits_to_the_layers_that_need_them(done, job, range_of, tiny, tmp_path):
    """In 4 or 8 bits or left in fp16; the file takes what was computed, and its graph. What it leaves for hands gives
    the same model, whose exports are derived from the copy in its folder."""
    knobs = ("quantize=svdquant_w4a16", "quant_level=1")
    pattern = r"quantize.budget is 0.01, expected from (\d+) bytes \(a share of [\d.]+\)"
    (least,) = range_of("quantize.budget=0.01", pattern, *knobs)
    limit = int(least * 1.2)
    run = job(*knobs, f"quantize.budget={limit}")
    record, table = record_of(run), rows_of(run / "budget.csv")
    entry = record["sensitivity"]["limit"]
    chosen = entry["candidates"][entry["taken"]]
    (formats,), (size,) = chosen["formats"].values(), chosen["weight_bytes"].values()
    assert sum(formats.values()) == len(table) and len(formats) > 1
    assert least < size <= entry["limit_bytes"] == limit
    sizes = record["sizes_bytes"]["unet"]
    graph = sizes["onnx_full_precision"] - sizes["weights_fp32"] // 2
    assert sizes["onnx_quantized"] - size == pytest.approx(graph, abs=100_000)
    assert abs(chosen["expected_psnr"] - chosen["psnr"]) < 14
    assert chosen["psnr"] == max(each["psnr"] for each in entry["candidates"].values())
    assert re.search(r"fit in [\d.]+ [KM]iB of weights", run_table(record))

    edited = tmp_path / "edited.yaml"
    shutil.copy(run / "assignment.yaml", edited)
    again = job(*knobs, f"assignment={edited}")
    assert (run / "layers.csv").read_text() == (again / "layers.csv").read_text()
    assert "assignment" in record_of(again)["inputs"] and "sensitivity" not in (again / "quantize.log").read_text()
    edited.unlink()
    for made, folder in ((run, "first"), (again, "second")):
        where = f"cache.dir={tiny.cache}", f"hydra.run.dir={tmp_path}/{folder}"
        done("hand_over.py", f"run={made}", "to=onnx", "images=false", *where)


def test_all_parts_share_the_memory_that_the_pipeline_has_to_fit_in(job, range_of):
    knobs = ("quantize=int8", "quant_level=3")
    pattern = r"fit is 1MB, expected from (\d+) bytes, which unet, .* process; to (\d+), below"
    least, most = range_of("fit=1MB", pattern, *knobs)
    limit = least + (most - least) // 2
    run = job(*knobs, f"fit={limit}")
    record, table = record_of(run), {row["name"]: row for row in rows_of(run / "budget.csv")}
    entry = record["sensitivity"]["limit"]
    chosen, (group,) = entry["candidates"][entry["taken"]], entry["groups"]
    taken = group["beside_weights_bytes"] + sum(chosen["weight_bytes"].values())
    assert least < taken <= limit and set(group["parts"]) == chosen["weight_bytes"].keys()
    assert len({row["chosen"] for row in table.values()}) == 2
    for part, size in record["sizes_bytes"].items():
        if size["onnx_quantized"] is not None and part in record["parts"]:
            assert size["onnx_quantized"] == pytest.approx(chosen["weight_bytes"][part], rel=0.1, abs=100_000)
    named = {row["name"] for row in rows_of(run / "layers.csv") if row["format"]}
    assert {name for name, row in table.items() if row["chosen"] == "int8" and not name.startswith("unet:")} <= named


def test_statistics_from_elsewhere_give_the_same_recipe(job, tiny, with_graphs, tmp_path):
    """As someone without a GPU does it: another machine's folder, no pass and no statistics here."""
    (statistics,) = (tiny.cache / "statistics").iterdir()
    cache = with_graphs(tmp_path / "cache")
    given = "infer.prompts=[a rocket,a teapot]", f"calibration={statistics}", f"cache.dir={cache}"
    first = job(*given, *LEVEL_3[:2], "quantize.seed=7")
    log = (first / "quantize.log").read_text()
    assert "calibrating on" not in log and "sampling.seed 42 (here 7)" in log
    assert not (cache / "statistics").exists()
    assert (first / "layers.csv").read_text() == (tiny.run / "layers.csv").read_text()
    assert "calibration" in record_of(first)["inputs"]


def test_knobs_reach_the_stage_that_they_are_for(job, tiny, tmp_path):
    """Each has another value than by default; what it decides is looked for in what the job leaves."""
    prompts = ["a cat", "a dog", "a key"]
    run = job(
        "quant_level=1", "calib_size=3", "quantize.n_steps=3", "quantize.batch_size=3", "quantize.seed=5",
        "infer.scale=2", "infer.seed=9", "infer.steps=3", "infer.batch_size=2", prompts_knob(prompts),
        "infer.negative_prompt=a red square", "infer.num_timed_runs=2", "infer.num_warmup_runs=1",
        f"cache.dir={tmp_path}/cache", "export_trt=tensorrt_rtx", "trt.targets=[SM86]", "trt.min_batch_size=2",
        "trt.max_batch_size=3", "trt.optimization_level=0", "trt.sizes=[64x64,64x128]",
        "quantize.parts={text_encoder:int8_dynamic,vae:int8}",
    )  # fmt: skip
    kept = {}
    for entry in (tmp_path / "cache/statistics").rglob("*.safetensors"):
        with safe_open(entry, "pt") as file:
            metadata = file.metadata()
        made_from = json.loads(metadata["origin"])
        kept[made_from.get("part")] = made_from["sampling"]
        assert len(json.loads(metadata["prompts"])) == 3
    told = {"steps": 3, "guidance_scale": 2.0, "batch_size": 3, "seed": 5}
    assert {part: sampling | told for part, sampling in kept.items()} == kept
    assert kept.keys() == {None, "text_encoder", "vae"}

    asked = Sampling(3, 2.0, 64, 64, 2, 9, ["a red square"] * 3)
    model = load_model(open_pipeline(tiny.folder, "sd15"))
    engines = {part: model.torch_engine(part) for part in ("unet", "vae", "text_encoder")}
    made = images_in(run / "images/full_precision")
    for number, image in enumerate(pipeline_of(model.checkpoint, engines)(prompts, asked).images):
        assert np.abs(made[f"{number:04}"] - image).max() <= 1

    record = record_of(run)
    assert len(record["fidelity"]["psnr"]["values"]) == 3
    latency = record["latency"]["openvino"]
    assert {part: list(times) for part, times in latency.items()} == {
        "unet": ["4"], "vae": ["2"], "text_encoder": ["2"], "image": ["2"]
    }  # fmt: skip
    assert (latency["vae"]["2"]["full_precision"]["n"], latency["vae"]["2"]["full_precision"]["warmup"]) == (2, 1)
    plan = json.loads((run / "plan/unet.plan.json").read_text())
    least, _, most = plan["profile"]["sample"]
    assert plan["targets"] == ["SM86"] and [shape[0] for shape in plan["profile"]["sample"]] == [2, 4, 6]
    assert (least[2:], sorted(most[2:])) == ([8, 8], [8, 16])

    assert record["peaks"].keys() == {"unet", "vae", "text_encoder"}
    of_parts = [row for row in rows_of(run / "layers.csv") if row["name"].startswith(("text_encoder:", "vae:"))]
    for part, output in (("text_encoder", "last_hidden_state"), ("vae", "dec")):
        sizes, own = record["sizes_bytes"][part], record["parts"][part]
        count = sum(row["name"].startswith(f"{part}:") and row["format"] == "int8" for row in of_parts)
        assert own["layers"]["quantized"] == record["parity"][f"{part}_layers"]["count"] == count > 10
        assert sizes["onnx_quantized"] < sizes["onnx_full_precision"] - count
        assert 1e-4 < own["outputs"][output]["relative_error"] < 0.1
        assert latency[part]["2"]["quantized"]["n"] == 2
    assert 0.98 < record["parts"]["text_encoder"]["outputs"]["last_hidden_state"]["worst"] < 1


def test_what_is_done_is_not_done_again_and_what_changed_is(done, refused, tiny, tmp_path):
    """The same job twice; then of other prompts, of which the folder of the first must not be taken for done."""
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    given = ["quantize.py", *tiny.knobs, *LEVEL_3, f"cache.dir={tiny.cache}", f"hydra.run.dir={run}"]
    before = (run / "metrics.json").read_bytes()
    assert "done before: nothing that this job depends on has changed" in done(*given).stdout
    assert (run / "metrics.json").read_bytes() == before
    (run / "images/full_precision/0007.png").write_bytes(b"of an attempt that was interrupted")
    assert "whose knobs, inputs or versions are not this one's" in refused(*given, "infer.prompts=[a key]")
    assert (run / "metrics.json").read_bytes() == before
    assert "done before" not in done(*given, "infer.prompts=[a key]", "overwrite=true").stdout
    assert record_of(run)["prompts"] == ["a key"] and list(images_in(run / "images/full_precision")) == ["0000"]


def test_a_run_calibrates_on_and_compares_images_of_all_sizes(done, job, with_graphs, tmp_path):
    drawn, cache = (prompts_knob(PROMPTS), "infer.sizes=[64x64,64x128]"), with_graphs(tmp_path / "cache")
    run = job("quant_level=1", "model.sizes=[128x64,64x64]", *drawn, f"cache.dir={cache}")
    fidelity = record_of(run)["fidelity"]
    assert len(fidelity["psnr"]["values"]) == len(fidelity["ssim"]["values"]) == 2
    (entry,) = (cache / "statistics").rglob("*.safetensors")
    assert b'\\"sizes\\": [\\"128x64\\", \\"64x64\\"]' in entry.read_bytes()[:10_000]
    untimed = "steps=2", "num_warmup_runs=0", "infer.num_timed_runs=1"
    done("infer.py", f"run={run}", *drawn, *untimed, f"hydra.run.dir={tmp_path}/again")
    folders = run / "images/full_precision", run / "images/quantized", tmp_path / "again/images"
    full, made, again = map(images_in, folders)
    for images in (full, made, again):
        assert {name: image.shape[1::-1] for name, image in images.items()} == {"0000": (64, 64), "0001": (64, 128)}
    assert all(np.abs(image - made[name]).max() <= 1 for name, image in again.items())


def test_a_sweep_compares_bits_calls_and_both(done, tiny, with_graphs, tmp_path):
    """Its jobs share what does not depend on calls; nothing quantized by the same calls is its own twin."""
    drawn = "infer.prompts=[a rocket,a teapot,a boat]", "infer.steps=6"
    sd15_by_ddim(tmp_path / "model")
    knobs = [word.replace(str(tiny.folder), f"{tmp_path}/model") for word in tiny.knobs]
    cache, sweep = with_graphs(tmp_path / "cache"), tmp_path / "sweep"
    where = f"cache.dir={cache}", f"hydra.sweep.dir={sweep}"
    done("quantize.py", "-m", *knobs, *drawn, "quant_level=0,3", "infer.reuse=null,0.33", *where)
    records = {path.parent.name: record_of(path.parent) for path in sweep.glob("*/metrics.json")}
    assert len(records) == 4
    levers = {name: record["levers"] for name, record in records.items() if record["levers"]}
    both, alone = levers["quant_level=3,reuse=0.33"], levers["quant_level=0,reuse=0.33"]
    assert both["schedule"].count("c") == 4 == both["calls"] and both["schedule"][0] == both["schedule"][-1] == "c"
    assert levers.keys() == {"quant_level=0,reuse=0.33", "quant_level=3,reuse=0.33"}
    assert both["chosen"]["prompts"] >= 1 and alone["twin"]["psnr"]["values"] == [None] * 3
    if both["schedule"] == alone["schedule"]:  # each recipe's own engine has chosen it
        assert both["calls_alone"]["psnr"]["values"] == alone["calls_alone"]["psnr"]["values"]
    for name in levers:
        assert records[name]["latency"]["openvino"]["image"]["1"]["quantized"]["calls_share"] > 0
    assert records["quant_level=0,reuse=null"]["layers"]["quantized"] == 0
    assert len(list(cache.glob("onnx/*/manifest.json"))) == 3 + 2  # both recipes' UNet beside what is unquantized
    assert "Bits and other levers" in (sweep / "report.html").read_text()
    run, again = f"run='{sweep}/quant_level=3,reuse=0.33'", f"infer.schedule={both['schedule']}"
    done("infer.py", run, *knobs[:4], *drawn, again, f"hydra.run.dir={tmp_path}/images")
    own, made = images_in(sweep / "quant_level=3,reuse=0.33/images/quantized"), images_in(tmp_path / "images/images")
    assert len(own) == 3, "the same calls make the same images"
    np.testing.assert_equal(made, own)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "torch_native"])
def test_precise_steps_are_those_of_the_preset_of_weights_alone(job, engine):
    """With all steps precise the images are that preset's to the bit, but for a shift, which chooses other scales."""
    knobs = "quant_level=3", "smoothing=none", "infer.steps=3", f"infer={engine}", "export_trt=none"
    recipes = {"all": ("infer.schedule=hhh", "quantize.shift=false"), "alone": ("quantize=int8_weight_only",)}
    runs = {name: job(*knobs, *own) for name, own in (recipes | {"some": ("infer.schedule=chf",)}).items()}
    made = {name: images_in(run / "images/quantized") for name, run in runs.items()}
    assert made["all"]
    np.testing.assert_equal(made["all"], made["alone"])
    record = record_of(runs["some"])
    levers = record["levers"]
    assert levers["schedule"] == "chf" and levers["precise_calls"] == {"h": 1, "f": 1}
    assert levers["calls"] == 4, "PNDM calls twice in its first step"
    assert record["fidelity"]["latent_sqnr_db"][-1] > 0 and levers["share"] > 0
    assert record["fidelity"]["psnr"]["mean"] > levers["bits_alone"]["psnr"]["mean"]


def test_precise_steps_are_chosen_and_made_again(done, tiny, job, tmp_path):
    """The record says what the chosen ones gain; whichever are taken, a run's files make its images."""
    run = job("quant_level=3", "infer.steps=4", "infer.precise_steps=2", "export_trt=tensorrt_rtx")
    found = record_of(run)["levers"]["precise"]
    assert found["prompts"] >= 1 and list(found["candidates"]) and sorted(found["schedule"]) == [*"cchh"]
    assert "\nprecise steps  " in run_table(record_of(run)) and (run / "plan/unet_weights_alone.plan").exists()
    taken = job("quant_level=3", "infer.steps=4", "infer.precise_steps=first1,last1", "export_trt=none")
    given = *tiny.knobs[:4], "infer.steps=4", "infer.precise_steps=first1,last1", f"hydra.run.dir={tmp_path}/images"
    done("infer.py", f"run={taken}", f"infer.prompts={json.dumps(record_of(taken)['prompts'])}", *given)
    np.testing.assert_equal(images_in(tmp_path / "images/images"), images_in(taken / "images/quantized"))


# ------------------------------------------ the shipped Stable Diffusion 3, with what transformers gain from

IMAGES = ("infer.prompts=[a glossy icon of a rocket,a glossy icon of a pizza]", "infer.steps=20", "calib_size=8",
          "infer.num_timed_runs=5", "infer.num_warmup_runs=1", "timing.budget_s=1.0", "export_trt=none")  # fmt: skip
MODULATIONS = "*.norm1.linear,*.norm1_context.linear"
EMBEDDERS = "time_text_embed.*,context_embedder,norm_out.linear"


@pytest.fixture
def transformer(done, tmp_path):
    """``transformer(*knobs)``: the folder, the record and the layers of a job of the shipped Stable Diffusion 3."""

    def made(*knobs: str) -> tuple[Path, dict, dict[str, dict]]:
        run = tmp_path / "run"
        done("quantize.py", "model=sd3_mini", *knobs, *IMAGES, f"cache.dir={tmp_path}/cache", f"hydra.run.dir={run}")
        return run, record_of(run), {row["name"]: row for row in rows_of(run / "layers.csv")}

    return made


@pytest.mark.needs(memory_gb=3)
def test_int8_per_token_with_joint_attention_runs_in_int8_and_keeps_the_images(transformer, int8_kernels):
    """Measured: 43.6 dB, and 41.0 without scales per token; two images and a processor's last bits move either by 1."""
    folder, record, layers = transformer("quantize=int8_dynamic", "quant_level=4")
    assert record["fidelity"]["psnr"]["mean"] > 38
    executed = record["executed"]
    # 81 linears, and the two products of 6 attentions
    assert executed["of"] == 81 + 12 and executed["count"] == executed["of"], executed["fell_back"]
    assert record["parity"]["quantized_attentions"]["count"] == 6
    queries = [row for name, row in layers.items() if name.endswith("attn.to_q")]
    assert {row["smoothing"] for row in queries} == {
        f"folded into transformer_blocks.{block}.norm1.linear" for block in range(6)
    }
    assert {row["per_token"] for name, row in layers.items() if row["role"] in ("ffn", "qkv")} == {"True"}
    (timed,) = record["latency"]["openvino"]["transformer"].values()
    (history,) = (folder.parent / "cache/occasions").glob("*.json")
    (occasion,) = json_of(history)["occasions"]
    (speedups,) = occasion["speedups"].values()
    assert speedups["call"] == pytest.approx([timed["speedup"], *timed["speedup_interval"]])


@pytest.mark.needs(memory_gb=3)
def test_rotated_four_bits_of_all_linears_run_in_onnx_runtime_and_take_a_quarter_of_fp16(transformer):
    """The images are the engine's. Measured: 27.5 dB, 24.0 without rotation, which ``layers.csv`` says is there."""
    folder, record, layers = transformer(
        "quantize=rotated_w4a4", "quant_level=3", "infer=onnxruntime",
        f"quantize.include.sd3=[{EMBEDDERS}]", f"quantize.weights_alone.sd3=[{MODULATIONS},{EMBEDDERS}]",
    )  # fmt: skip
    assert not record["simulated"] and record["fidelity"]["psnr"]["mean"] > 22
    graphs = (ir.load(onnx_path(each, "transformer")).graph for each in (folder, folder / "full_precision"))
    ours, full = (sum(value.const_value.nbytes for value in graph.initializers.values()) for graph in graphs)
    assert ours < 0.28 * full
    assert {row["rotation"] for name, row in layers.items() if row["activation_format"]} == {"64"}
    assert layers["context_embedder"]["format"] == "int4" and not layers["context_embedder"]["activation_format"]
