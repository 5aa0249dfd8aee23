"""Recipes beyond the plain one, on a tiny pipeline whose statistics and graphs an earlier run has left."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling

from .conftest import Tiny

pytestmark = pytest.mark.nightly


def rows(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def record_of(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


@pytest.fixture
def job(command, tiny: Tiny, tmp_path):
    """``job(*knobs)``: the folder of a job that ends well, with the cache of the tiny pipeline's run."""

    def done(*knobs: str) -> Path:
        run = tmp_path / "run"
        result = command("quantize.py", *tiny.knobs, f"cache.dir={tiny.cache}", *knobs, f"hydra.run.dir={run}")
        assert result.returncode == 0, result.stderr[-3000:]
        return run

    return done


def test_another_recipe_takes_its_statistics_from_the_cache_and_keeps_what_is_most_sensitive(job, tiny):
    """And of the first prompt alone: of that the run before left a snapshot."""
    entries = {path: path.stat().st_mtime_ns for path in tiny.cache.glob("statistics/*/*.safetensors")}
    run = job("quant_level=2.5", "alpha=auto", "smoothing=modelopt", "keep=2", "calib_size=1")
    assert "statistics of prompts 1 to 1 come from the cache" in (run / "quantize.log").read_text()
    assert {path: path.stat().st_mtime_ns for path in tiny.cache.glob("statistics/*/*.safetensors")} == entries

    ranked, record = rows(run / "sensitivity.csv"), record_of(run)
    errors = [float(row["network_error"]) for row in ranked]
    assert len(ranked) == 2 + record["layers"]["quantized"] and errors == sorted(errors, reverse=True)
    assert [row["name"] for row in ranked if row["kept"] == "True"] == [row["name"] for row in ranked[:2]]
    with Image.open(run / "sensitivity.png") as plot:
        assert plot.size == (1600, 600)
    curve = record["sensitivity"]["curve"]
    assert [point["kept"] for point in curve][:3] == [0, 1, 2]
    assert curve[2]["relative_error"] < curve[0]["relative_error"]

    layers = {row["name"]: row for row in rows(run / "layers.csv")}
    assert all(layers[row["name"]]["reason"] == "among the most sensitive layers" for row in ranked[:2])
    searched = [row for row in layers.values() if row["alpha"]]
    gains = [float(row["accumulated_error_alpha_0.8"]) - float(row["accumulated_error"]) for row in searched]
    assert len({row["alpha"] for row in searched}) > 1 and sum(gains) > 0
    assert record["smoothing"]["multiplications"] == len(searched) > 4


def test_a_budget_gives_bits_to_the_layers_that_need_them(command, job, tiny, tmp_path):
    """In 4 or 8 bits or left in fp16; the file takes what was computed, and its graph.

    What it leaves for hands gives the same model, whose exports are derived from the copy in its folder.
    """
    knobs = ("quantize=svdquant_w4a16", "quant_level=1")
    refused = command(
        "quantize.py", *tiny.knobs, f"cache.dir={tiny.cache}", *knobs, "quantize.budget=0.01",
        f"hydra.run.dir={tmp_path}/refused",
    )  # fmt: skip
    assert refused.returncode == 2 and "calibrat" not in refused.stderr.splitlines()[-1]
    found = re.search(r"quantize.budget is 0.01, expected from (\d+) bytes \(a share of ([\d.]+)\)", refused.stderr)
    limit = int(int(found[1]) * 1.2)
    run = job(*knobs, f"quantize.budget={limit}")
    record, table = record_of(run), rows(run / "budget.csv")
    chosen = record["sensitivity"]["budget"]
    assert sum(chosen["layers"].values()) == len(table) and chosen["layers"]["svdquant_w4a16"] < len(table)
    assert int(found[1]) < chosen["chosen_bytes"] <= chosen["limit_bytes"] == limit
    sizes = record["sizes_bytes"]["unet"]
    graph = sizes["onnx_full_precision"] - sizes["weights_fp32"] // 2
    assert sizes["onnx_quantized"] - chosen["chosen_bytes"] == pytest.approx(graph, abs=100_000)
    worst = max(table, key=lambda row: float(row["network_error_svdquant_w4a16"]) / float(row["bytes_unquantized"]))
    assert worst["chosen"] in ("int8_weight_only", "unquantized")
    assert 0.2 < chosen["predicted_error"] / chosen["measured_error"] < 5  # of images, where white is 1
    assert chosen["measured_error"] == min(each["measured_error"] for each in chosen["candidates"].values())

    edited, again, tables = tmp_path / "edited.yaml", tmp_path / "again", (run / "layers.csv").read_text()
    edited.write_text((run / "assignment.yaml").read_text())
    result = command(
        "quantize.py", *tiny.knobs, f"cache.dir={tiny.cache}", *knobs, f"assignment={edited}", f"hydra.run.dir={again}"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert tables == (again / "layers.csv").read_text()
    assert "assignment" in record_of(again)["inputs"] and "sensitivity" not in (again / "quantize.log").read_text()
    edited.unlink()
    for made in (run, again):
        exported = command(
            "hand_over.py", f"run={made}", "to=onnx", "images=false", f"cache.dir={tiny.cache}",
            f"hydra.run.dir={tmp_path}/exported_{made.name}",
        )  # fmt: skip
        assert exported.returncode == 0, exported.stderr[-3000:]


def test_all_parts_share_the_memory_that_the_pipeline_has_to_fit_in(command, job, tiny, tmp_path):
    knobs = ("quantize=int8", "quant_level=3")
    refused = command(
        "quantize.py", *tiny.knobs, f"cache.dir={tiny.cache}", *knobs, "fit=1MB", f"hydra.run.dir={tmp_path}/refused"
    )
    assert refused.returncode == 2 and "calibrat" not in refused.stderr.splitlines()[-1]
    found = re.search(r"fit is 1MB, expected from (\d+) bytes, which unet, .* process; to (\d+), below", refused.stderr)
    least, most = int(found[1]), int(found[2])
    limit = least + (most - least) // 2
    run = job(*knobs, f"fit={limit}")
    record, table = record_of(run), {row["name"]: row for row in rows(run / "budget.csv")}
    entry = record["sensitivity"]["fit"]
    chosen, (group,) = entry["candidates"][entry["taken"]], entry["groups"]
    taken = group["beside_weights_bytes"] + sum(chosen["weight_bytes"].values())
    assert least < taken <= limit and set(group["parts"]) == chosen["weight_bytes"].keys()
    assert len({row["chosen"] for row in table.values()}) == 2
    for part, size in record["sizes_bytes"].items():
        if size["onnx_quantized"] is not None and part in record["parts"]:
            assert size["onnx_quantized"] == pytest.approx(chosen["weight_bytes"][part], rel=0.1, abs=100_000)
    named = {row["name"] for row in rows(run / "layers.csv") if row["format"]}
    assert {name for name, row in table.items() if row["chosen"] == "int8" and not name.startswith("unet:")} <= named


def test_statistics_from_elsewhere_give_the_same_recipe(command, tiny, with_graphs, tmp_path):
    """As someone without a GPU does it: another machine's folder, no pass and no statistics here."""
    (statistics,) = (tiny.cache / "statistics").iterdir()
    run = tmp_path / "reused"
    result = command(
        "quantize.py", *tiny.knobs, "quant_level=3", "alpha=0.8", f"calibration={statistics}", "quantize.seed=7",
        f"cache.dir={with_graphs(tmp_path / 'cache')}", f"hydra.run.dir={run}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    log = (run / "quantize.log").read_text()
    assert "calibrating on" not in log and "sampling.seed 42 (here 7)" in log
    assert not (tmp_path / "cache/statistics").exists()
    assert (run / "layers.csv").read_text() == (tiny.run / "layers.csv").read_text()
    assert "calibration" in record_of(run)["inputs"]


def test_knobs_reach_the_stage_that_they_are_for(job, tiny, tmp_path):
    """Each has another value than by default; what it decides is looked for in what the job leaves."""
    prompts = ["a cat", "a dog", "a key"]
    run = job(
        "quant_level=1", "calib_size=3", "quantize.n_steps=3", "quantize.batch_size=3", "quantize.seed=5",
        "infer.scale=2", "infer.seed=9", "infer.steps=3", "infer.batch_size=2", f"infer.prompts=[{','.join(prompts)}]",
        "infer.negative_prompt=a red square", "infer.num_timed_runs=2", "infer.num_warmup_runs=1",
        f"cache.dir={tmp_path}/cache", "export_trt=tensorrt_rtx", "trt.targets=[SM86]", "trt.min_batch_size=2",
        "trt.max_batch_size=3", "trt.optimization_level=0",
        "quantize.parts={text_encoder:int8_dynamic,vae:int8}",
    )  # fmt: skip
    kept = {}
    for entry in (tmp_path / "cache/statistics").rglob("*.safetensors"):
        with safe_open(entry, "pt") as file:
            metadata = file.metadata()
        made_from = json.loads(metadata["origin"])
        kept[made_from.get("part")] = made_from["sampling"]
        assert len(json.loads(metadata["prompts"])) == 3
    assert kept.keys() == {None, "text_encoder", "vae"}
    for sampling in kept.values():
        assert {"steps": 3, "guidance_scale": 2.0, "batch_size": 3, "seed": 5}.items() <= sampling.items()

    asked = Sampling(3, 2.0, 64, 64, 2, 9, ["a red square"] * 3)
    model = load_model(open_pipeline(tiny.folder, "sd15"))
    engines = {part: model.torch_engine(part) for part in ("unet", "vae", "text_encoder")}
    for number, image in enumerate(pipeline_of(model.checkpoint, engines)(prompts, asked).images):
        with Image.open(run / f"images/full_precision/{number:04}.png") as made:
            assert np.abs(np.asarray(made).astype(int) - image).max() <= 1

    record = record_of(run)
    assert len(record["fidelity"]["psnr"]["values"]) == 3
    latency = record["latency"]["openvino"]
    assert {part: list(times) for part, times in latency.items()} == {
        "unet": ["4"], "vae": ["2"], "text_encoder": ["2"], "image": ["2"]
    }  # fmt: skip
    assert (latency["vae"]["2"]["full_precision"]["n"], latency["vae"]["2"]["full_precision"]["warmup"]) == (2, 1)
    plan = json.loads((run / "plan/unet.plan.json").read_text())
    assert plan["targets"] == ["SM86"] and [shape[0] for shape in plan["profile"]["sample"]] == [2, 4, 6]

    assert record["peaks"].keys() == {"unet", "vae", "text_encoder"}
    of_parts = [row for row in rows(run / "layers.csv") if row["name"].startswith(("text_encoder:", "vae:"))]
    for part, output in (("text_encoder", "last_hidden_state"), ("vae", "dec")):
        sizes, own = record["sizes_bytes"][part], record["parts"][part]
        count = sum(row["name"].startswith(f"{part}:") and row["format"] == "int8" for row in of_parts)
        assert own["layers"]["quantized"] == record["parity"][f"{part}_layers"]["count"] == count > 10
        assert sizes["onnx_quantized"] < sizes["onnx_full_precision"] - count
        assert 1e-4 < own["outputs"][output]["relative_error"] < 0.1
        assert latency[part]["2"]["quantized"]["n"] == 2
    assert 0.98 < record["parts"]["text_encoder"]["outputs"]["last_hidden_state"]["worst"] < 1


def test_what_is_done_is_not_done_again_and_what_changed_is(command, tiny, tmp_path):
    """The same job twice; then of other prompts, of which the folder of the first must not be taken for done."""
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    given = ["quantize.py", *tiny.knobs, "quant_level=3", "alpha=0.8", "quantize.snapshots=[1]",
             f"cache.dir={tiny.cache}", f"hydra.run.dir={run}"]  # fmt: skip
    before = (run / "metrics.json").read_bytes()
    again = command(*given)
    assert again.returncode == 0 and "done before: nothing that this job depends on has changed" in again.stdout
    assert (run / "metrics.json").read_bytes() == before
    (run / "images/full_precision/0007.png").write_bytes(b"of an attempt that was interrupted")
    refused = command(*given, "infer.prompts=[a key]")
    assert refused.returncode == 2 and "whose knobs, inputs or versions are not this one's" in refused.stderr
    assert (run / "metrics.json").read_bytes() == before
    other = command(*given, "infer.prompts=[a key]", "overwrite=true")
    assert other.returncode == 0 and "done before" not in other.stdout, other.stderr[-3000:]
    assert record_of(run)["prompts"] == ["a key"]
    assert [path.name for path in (run / "images/full_precision").iterdir()] == ["0000.png"]
