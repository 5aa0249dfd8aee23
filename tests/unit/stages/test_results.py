"""Scores and counts of a record, of images, files and layers made by hand."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx.helper import make_graph, make_model, make_node
from scipy.stats import ttest_1samp

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.inference.latents import digest_of
from sd_quant.metrics import SCORES, network_scores, text_image
from sd_quant.metrics.text_image import fid
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.results import same_steps, text_scores
from sd_quant.stages.run_record import count_layers, count_smoothing, sizes
from sd_quant.stages.session import open_unchecked
from sd_quant_scores import inception, mlperf, ocr
from sd_quant_scores.mlperf import PROTOCOL, captions_sha256, git_blob
from tests.presets import infer_job
from tests.refusals import refused

from ...preference_networks import small_dino
from ...text_scores import Means, metrics_of, small_clip
from ...zoo.families import TINY

pytestmark = pytest.mark.commit

IMAGES = 20


def test_words_are_read_where_that_is_switched_on(monkeypatch):
    monkeypatch.setattr(ocr, "reader", lambda: lambda image: ["OPEN"] if image.any() else [])
    monkeypatch.setattr("sd_quant.stages.results.how_made", lambda *_: {})
    prompts = ["a door with 'OPEN' on it", "a cat"]
    variants = {"full_precision": np.full((2, 64, 64, 3), 9, np.uint8), "quantized": np.zeros((2, 64, 64, 3), np.uint8)}
    found = text_scores(metrics_of(ocr=True), None, None, prompts, variants)
    assert found["quantized"]["clip_score"]["reason"] == "metrics does not ask for it"
    assert [found[variant]["ocr"]["values"] for variant in ("quantized", "full_precision")] == [[0, None], [1, None]]
    assert found["quantized"]["ocr"]["difference"]["mean"] == -1
    nothing = text_scores(metrics_of(), None, None, prompts, variants)
    assert nothing == {"value": None, "reason": "no weights were named in metrics"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """By a protocol of this run's own facts: MLPerf's, but for size and number of images, and with stand-in judges."""
    TINY["sdxl"](tmp_path / "sdxl")
    captions = "\n".join(f'{index}\t"A cat number {index}."' for index in range(IMAGES))
    (tmp_path / "captions_source.tsv").write_text(f"id\tcaption\n{captions}\n")
    torch.save(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)), tmp_path / "latents.pt")
    job = infer_job(
        "model=sdxl", f"model.path={tmp_path / 'sdxl'}", "infer.width=64", "infer.height=64", "infer.batch_size=8",
        f"infer.prompts={tmp_path / 'captions_source.tsv'}", f"infer.latents={tmp_path / 'latents.pt'}",
        "infer.scale=8.0", f'infer.negative_prompt="{PROTOCOL["negative_prompt"]}"', "infer.steps=2",
    )  # fmt: skip
    random, references = np.random.default_rng(0), tmp_path / "val2014.npz"
    images, features = random.integers(0, 255, (IMAGES, 64, 64, 3), dtype=np.uint8), random.normal(size=(50, 12))
    np.savez(references, mu=100 + features.mean(0), sigma=np.cov(features, rowvar=False))
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 20)
    monkeypatch.setattr(inception, "inception", Means)
    metrics = metrics_of(clip_weights=str(small_clip(tmp_path / "clip")), fid_references=str(references))
    prompts = job.infer.prompt_list()
    for name, value in {
        "prompts": captions_sha256(prompts), "steps": 2, "height": 64, "width": 64,
        "latents": digest_of(sampling_of(job.infer).latents), "clip_network": {"layers": 1, "width": 16, "patch": 16},
        "fid_references": git_blob(references),
    }.items():  # fmt: skip
        monkeypatch.setitem(PROTOCOL, name, value)
    score = SCORES["clip_score"].compute(images, prompts, tmp_path / "clip")["value"]
    distance = fid(images, references)["value"]
    monkeypatch.setattr(mlperf, "CLIP", (score - 0.1, score + 0.1))
    monkeypatch.setattr(mlperf, "FID", (distance * 0.98, distance * 1.02))
    checkpoint = open_unchecked(job.model).checkpoint
    return SimpleNamespace(infer=job.infer, checkpoint=checkpoint, prompts=prompts, images=images, metrics=metrics)


def judged(run: SimpleNamespace, infer: Mapping = {}, metrics: Mapping = {}, **changed: object) -> dict:
    """The scores of the run with these changes."""
    given = SimpleNamespace(**vars(run) | changed)
    of_job = replace(run.metrics, **metrics), replace(run.infer, **infer)
    found = text_scores(*of_job, given.checkpoint, given.prompts, {"quantized": given.images})
    json.dumps(found, allow_nan=False)
    return found["quantized"]


@pytest.mark.slow
def test_the_protocol_is_followed_by_the_runs_own_facts_and_every_other_one_is_named(run, tmp_path):
    """Where one is missing, or weights cannot be used, there is no verdict."""
    assert judged(run)["mlperf"] == {"passes": True, "reason": None}
    found = judged(run, images=255 - run.images)["mlperf"]
    assert found["passes"] is False and "FID" in found["reason"] and "is not within" in found["reason"]
    np.savez(tmp_path / "other.npz", mu=np.zeros(12), sigma=np.eye(12))
    torch.save(torch.zeros(1, 4, 8, 8), tmp_path / "other.pt")
    shutil.copytree(tmp_path / "sdxl", other := tmp_path / "other")
    scheduler = other / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"timestep_spacing": "trailing"}))
    other_sampler = open_unchecked(infer_job("model=sdxl", f"model.path={other}").model).checkpoint
    for changes, sentence in (
        ({"prompts": ["A dog.", *run.prompts[1:]]}, "prompts are not the 5000 captions"),
        ({"checkpoint": other_sampler}, "scheduler is {'class': 'EulerDiscreteScheduler', 'timestep_spacing': 'trail"),
        ({"infer": {"steps": 3}}, "steps is 3 instead of 2"),
        ({"infer": {"scale": 7.5}}, "guidance_scale is 7.5 instead of 8.0"),
        ({"infer": {"negative_prompt": None}}, "negative_prompt is None instead"),
        ({"infer": {"latents": str(tmp_path / "other.pt")}}, "latents are not the one noise of tools/latents.pt"),
        ({"infer": {"latents": None, "height": 128}}, "height is 128 instead of 64; latents are not"),
        ({"infer": {"latents": None, "width": 128}}, "width is 128 instead of 64; latents are not"),
        ({"metrics": {"clip_weights": None}}, "clip_network is None instead of"),
        ({"metrics": {"fid_references": str(tmp_path / "other.npz")}}, "fid_references are not tools/val2014.npz"),
    ):
        found = judged(run, **changes)["mlperf"]
        assert found["passes"] is None and found["reason"].startswith(f"not MLPerf's protocol: {sentence}")
        assert found["reason"].count("; ") == sentence.count("; ")
    found = judged(run, metrics={"clip_weights": str(other), "fid_references": None})
    assert found["clip_score"]["value"] is None and "has no config.json" in found["clip_score"]["reason"]
    assert found["fid"] == {"value": None, "reason": "metrics does not ask for it"}
    assert found["mlperf"]["passes"] is None and "fid_references are not" in found["mlperf"]["reason"]


@pytest.mark.parametrize(("knobs", "installed", "kind", "named"), [
    ({"ocr": True}, False, ResourceError, r"metrics.ocr needs .* rapidocr, .* pip install 'sd-quant\[ocr\]', or"),
    ({"ocr": False}, False, None, None),
    ({"fid_references": "{here}"}, False, ResourceError, r".*not installed; .*: pip install 'sd-quant\[fid\]'"),
    ({"fid_references": "{here}"}, True, None, None),
    ({"clip_weights": "nowhere"}, True, ConfigError, "metrics.clip_weights names nowhere, which does not exist.*; "
     "give a folder with a CLIPModel of transformers and its processor, such as openai/clip-vit-base-patch32"),
    ({"clip_weights": "{here}"}, True, ConfigError, ".*no config.json, expected for CLIP score"),
    ({"pickscore_weights": "{here}"}, True, ConfigError, ".*3.94 GB; no licence is stated"),
    ({"hps_weights": "{here}"}, True, ConfigError, ".*is no file.*1.97 GB, Apache-2.0"),
    ({"image_reward_weights": "{here}"}, True, ConfigError, ".*no ImageReward.pt, .*1.79 GB, Apache-2.0"),
    ({"dino_weights": "{here}"}, True, ConfigError, ".*no config.json, .* 346 MB; Apache-2.0"),
])  # fmt: skip
def test_what_is_not_there_is_refused_before_anything_is_computed(tmp_path, monkeypatch, knobs, installed, kind, named):
    found = SimpleNamespace(submodule_search_locations=[""]) if installed else None
    monkeypatch.setattr(inception.importlib.util, "find_spec", lambda package: found)
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    ocr.reader.cache_clear()
    given = {knob: str(tmp_path) if value == "{here}" else value for knob, value in knobs.items()}
    with refused(named, kind):
        metrics_of(**given).check_files()


def test_each_variant_has_its_difference_from_full_precision_prompt_by_prompt(monkeypatch, tmp_path):
    """Two images of one prompt count as one; by scipy's interval of a paired t test."""
    scored = {0: [1.0, 2.0, 3.0, 4.0, None], 9: [1.5, 2.5, 2.0, 4.25, 7.0]}
    by_network = network_scores.score_images

    def entry(score, images, beside, weights):
        if score.key != "hps":
            return by_network(score, images, beside, weights)
        return {"value": 1.0, "reason": None, "values": scored[int(images[0, 0, 0, 0])]}

    monkeypatch.setattr(network_scores, "score_images", entry)
    monkeypatch.setattr("sd_quant.stages.results.how_made", lambda *arguments: {})
    small_dino(tmp_path)
    (tmp_path / "hps.pt").touch()
    metrics = metrics_of(hps_weights=str(tmp_path / "hps.pt"), dino_weights=str(tmp_path))
    made = np.random.default_rng(0).integers(0, 255, (2, 5, 64, 64, 3), dtype=np.uint8)
    made[0, 0, 0, 0, 0], made[1, 0, 0, 0, 0] = 0, 9
    variants = {"full_precision": made[0], "quantized": made[1]}
    found = text_scores(metrics, None, None, ["a", "a", "b", "c", "d"], variants)
    json.dumps(found, allow_nan=False)
    full, quantized = found.values()
    expected = ttest_1samp([0.5, -1.0, 0.25], 0).confidence_interval(0.95)
    difference = {"mean": -0.25 / 3, "low": expected.low, "high": expected.high}
    assert quantized["hps"]["difference"] == pytest.approx(difference) and "difference" not in full["hps"]
    assert full["dino_distance"]["value"] == pytest.approx(0, abs=1e-6)
    first, second, *others = quantized["dino_distance"]["values"]
    mean = np.mean([(first + second) / 2, *others])
    assert quantized["dino_distance"]["difference"]["mean"] == pytest.approx(mean, abs=1e-6)
    assert quantized["pickscore"] == {"value": None, "reason": "metrics does not ask for it"}
    alone = text_scores(metrics, None, None, ["a"] * 5, variants)["quantized"]["hps"]["difference"]
    assert alone == {"mean": pytest.approx(0.0625), "low": None, "high": None}


def test_sizes_are_those_of_a_parts_own_files(tmp_path):
    """A graph counts with the weights beside it; what is not exported has none, whatever else lies in the folder."""
    for name, size in {
        "onnx/unet/unet.onnx": 10, "onnx/unet/unet.onnx.data": 300, "plan/unet.plan": 5, "onnx/vae/vae.onnx": 70,
        "full_precision/onnx/unet/unet.onnx": 20, "full_precision/onnx/unet/unet.onnx.data": 2000,
        "onnx/text/text.onnx": 7,
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    parts = dict.fromkeys(("unet", "vae"), SimpleNamespace(refused=None))
    parts["text"] = SimpleNamespace(refused="it draws random numbers")
    none = {"value": None, "reason": "not exported: it draws random numbers"}
    plain, no_plan = ({"value": None, "reason": because} for because in ("not quantized", "no plan was asked for"))
    assert sizes(parts, {"unet": 1000, "vae": 35, "text": 35}, tmp_path) == {
        "unet": {"onnx_full_precision": 2020, "onnx_quantized": 310, "plan": 5, "weights_fp32": 4000},
        "vae": {"onnx_full_precision": 70, "onnx_quantized": plain, "plan": no_plan, "weights_fp32": 140},
        "text": {"onnx_full_precision": none, "onnx_quantized": none, "plan": none, "weights_fp32": 140},
    }


def test_layers_count_by_their_formats_wherever_they_are_smoothed(tmp_path):
    """``k`` stays in high precision and reads what ``q`` reads, so both are divided by what the norm multiplies."""
    vector = {"pre_quant_scale": torch.ones(4)}
    rows = [
        LayerAssignment("norm", "norm", (4,), output_scale=torch.ones(4)),
        LayerAssignment("q", "qkv", (4, 4), "int8", "int8", **vector, folded_into="norm"),
        LayerAssignment("k", "qkv", (4, 4), **vector, folded_into="norm"),
        LayerAssignment("out", "linear", (4, 4), "int8", "int8", **vector),
        LayerAssignment("conv", "conv", (4, 4, 3, 3), "int8", "int8"),
        LayerAssignment("conv_in", "excluded", (4, 4, 3, 3)),
        LayerAssignment("attn", "attention", (), None, "int8"),
    ]
    nodes = [make_node("Mul", ["x", "x"], ["out.smoothed"]), make_node("Mul", ["x", "x"], ["y"])]
    assignment = {row.name: row for row in rows}
    assert count_layers(assignment) == {"quantized": 3, "high_precision": 2}
    counts = {"smoothed_layers": 2, "folded_layers": 1}
    assert count_smoothing(assignment, tmp_path / "unet.onnx") == counts | {"multiplications": 0}  # without a graph
    onnx.save(make_model(make_graph(nodes, "unet", [], [])), tmp_path / "unet.onnx")
    assert count_smoothing(assignment, tmp_path / "unet.onnx") == counts | {"multiplications": 1}


def test_latents_of_other_steps_are_compared_behind_the_last():
    full, quantized = torch.arange(6.0).reshape(2, 3, 1), torch.arange(4.0).reshape(2, 2, 1)
    assert same_steps(full, full) == (full, full)
    assert [[each.tolist() for each in side] for side in same_steps(full, quantized)] == [
        [[[2.0]], [[5.0]]], [[[1.0]], [[3.0]]]
    ]  # fmt: skip
