"""Quantized checkpoints of anybody, judged by the command."""

import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.names.sgm import sgm_names

from ..preference_networks import small_dino
from .shared import PROMPTS, SAMPLING, images_in, json_of, record_of, rows_of

pytestmark = pytest.mark.commit

PREFIX = "model.diffusion_model."


def cast(checkpoint: Path, path: Path) -> Path:
    """The shipped UNet as a file for ComfyUI with every matrix and kernel cast to FP8, which has no scales."""
    weights = open_nemo(checkpoint).components["unet"]
    state = {PREFIX + key: weights[name].half() for name, key in sgm_names(weights).items()}
    save_file({name: each.to(torch.float8_e4m3fn) if each.ndim > 1 else each for name, each in state.items()}, path)
    return path


@pytest.fixture(scope="module")
def judged(done, main_job, checkpoint, tmp_path_factory):
    """The folder of three candidates: a file that was cast, what a run has handed over, and the run itself; and the
    command that has judged them, which can be given again."""
    folder = tmp_path_factory.mktemp("judge")
    where = f"hydra.run.dir={folder}/handed", f"cache.dir={main_job.cache}"
    done("hand_over.py", f"run={main_job.directory}", "to=diffusers_sdnq", *where)
    candidates = cast(checkpoint, folder / "cast.safetensors"), folder / "handed/diffusers_sdnq", main_job.directory
    small_dino(folder / "dino")
    prompts = "".join(f"{prompt},{prompt.split()[-1]}s\n" for prompt in PROMPTS)
    (folder / "drawbench.csv").write_text(f"Prompts,Category\n{prompts}")
    given = (
        "judge.py", f"candidates=[{','.join(map(str, candidates))}]", f"infer.prompts={folder}/drawbench.csv",
        *SAMPLING, f"metrics.dino_weights={folder}/dino", "timing.budget_s=0", "judge.trust_runs=true",
        f"cache.dir={main_job.cache}", f"hydra.run.dir={folder}/judged",
    )  # fmt: skip
    said = done(*given).stdout
    assert "cast.safetensors" in said and "bits a weight" in said
    return folder / "judged", given


def test_candidates_are_judged_and_the_report_says_which_is_worth_its_bits(judged):
    folder, _ = judged
    entry = record_of(folder / "cast.safetensors")
    distances = entry["text_scores"]["quantized"]["dino_distance"]
    assert distances["difference"]["mean"] == pytest.approx(statistics.fmean(distances["values"]), abs=1e-6)
    assert entry["prompts"] == list(PROMPTS)
    page = (folder / "report.html").read_text()
    for shown in ("Which candidate is worth its bits", "Worth ", "What is in each candidate",
                  "Which layers hurt", "174 float8_e4m3fn of 174"):  # fmt: skip
        assert shown in page, shown
    assert (folder / "pareto_size.png").exists() and (folder / "summary.csv").exists()


def test_each_candidate_has_images_figures_and_a_table_of_its_layers(judged):
    """A run is judged by its own engine: OpenVINO runs its ONNX file, and images agree up to rounding of codes."""
    folder, _ = judged
    records, full = {}, images_in(folder / "run/images/full_precision")
    for name in ("cast.safetensors", "diffusers_sdnq", "run"):
        records[name] = entry = record_of(folder / name)
        assert entry["status"] == "done" and len(entry["fidelity"]["psnr"]["values"]) == len(PROMPTS) == len(full)
        assert entry["degenerate"] == [] and 15 < entry["fidelity"]["psnr"]["mean"] < 70
        assert 0 < entry["judged"]["network_error"] < 0.5
        np.testing.assert_equal(images_in(folder / name / "images/full_precision"), full)
        rows = rows_of(folder / name / "layers.csv")
        assert len(rows) == 174 and {row["format"] for row in rows} == set(entry["judged"]["formats"])
    cast_entry, sdnq, run = (record["judged"] for record in records.values())
    assert cast_entry["formats"] == {"float8_e4m3fn": 174} and 8 < cast_entry["bits"] < 8.5
    assert sdnq["formats"]["int8"] + sdnq["formats"]["high precision"] == 174 and 9 < sdnq["bits"] < 10
    errors = [each["network_error"] for each in cast_entry["hurting"]]
    assert len(errors) == 10 and errors == sorted(errors, reverse=True) and errors[-1] > 0
    assert run["runtime"]["name"] == "openvino" and run["runtime"]["speedup"] > 0
    assert min(run["runtime"]["agreement"]["values"]) > 25


def test_what_was_handed_over_is_read_as_it_was_written(judged):
    """By layers and by figures."""
    folder, _ = judged
    (handed,) = (folder.parent / "handed").glob("*/hand_over.json")
    held, judgement = json_of(handed), record_of(folder / "diffusers_sdnq")
    rows = rows_of(folder / "diffusers_sdnq/layers.csv")
    errors = [float(row["weight_error"]) for row in rows if row["weight_error"]]
    assert len(errors) == held["quantized"] == judgement["layers"]["quantized"]
    for score, values in held["fidelity"].items():
        assert judgement["fidelity"][score]["values"] == pytest.approx(values["values"], rel=1e-6), score
    assert statistics.median(errors) < 1.5e-2 and max(errors) < 5e-2  # of INT8, though smoothing is folded


def test_what_was_judged_is_not_judged_again(judged, done):
    folder, given = judged
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}
    said = done(*given).stdout
    assert len(before) == 3 and "3 of 3 candidates were judged before" in said, said[-2000:]
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}


def test_a_candidate_of_another_size_is_refused_before_anything_is_computed(refused, checkpoint, tmp_path):
    path, key = cast(checkpoint, tmp_path / "a.safetensors"), f"{PREFIX}input_blocks.0.0.weight"
    state = load_file(path)
    state[key] = state[key].float()[:, :, :1].to(torch.float8_e4m3fn).contiguous()
    save_file(state, path)
    said = refused("judge.py", f"candidates=[{path}]", f"hydra.run.dir={tmp_path}/judged", code=3)
    assert "of another size than the full-precision model" in said
    assert not (tmp_path / "judged/sweep.json").exists()


def test_a_candidate_decides_neither_where_is_written_nor_what_is_removed(command, done, tiny, tmp_path):
    """A folder that is named by what is above it, and a run whose config names another cache, as a stranger's may."""
    outside, run, cache = tmp_path / "candidates", tmp_path / "candidates/run", tmp_path / "cache"
    shutil.copytree(tiny.run, run)
    knobs = yaml.safe_load((run / "config.yaml").read_text())
    knobs["cache"]["dir"] = str(tmp_path / "victim")
    (run / "config.yaml").write_text(yaml.safe_dump(knobs))
    for name in ("report.html", "layers.csv", "summary.mine", "images/grid.png"):
        (outside / name).parent.mkdir(exist_ok=True)
        (outside / name).write_text("mine")
    (outside / "model_index.json").write_text("{}")

    def content(folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before, where = content(outside), f"hydra.run.dir={tmp_path}/judged/deep"
    knobs = [knob for knob in tiny.knobs if knob.startswith(("model", "infer."))]
    given = "judge.py", *knobs, "judge.layers=0", f"cache.dir={cache}", where
    above = command(*given, f"candidates=[{run}/..]")
    assert above.returncode in (2, 3) and "Traceback" not in above.stderr, above.stderr[-2000:]
    done(*given, f"candidates=[{run}]")
    runtime = record_of(tmp_path / "judged/deep/run")["judged"]["runtime"]
    assert runtime == {"reason": "judge.trust_runs is false, and a run's file is executed only where it is true"}
    assert content(outside) == before and not (tmp_path / "victim").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"candidates", "cache", "judged"}
