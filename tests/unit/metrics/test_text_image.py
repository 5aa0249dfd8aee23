import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.image.fid import FrechetInceptionDistance, _compute_fid

from sd_quant.errors import ConfigError
from sd_quant.metrics import SCORES, network_scores, text_image
from sd_quant.metrics.text_image import fid, frechet_distance, moments

from ...text_scores import LONGEST, Means, small_clip

pytestmark = pytest.mark.commit

CLIP_SCORE = SCORES["clip_score"]

PROMPTS = ["a cat", "a dog on a mat in a large old house by the sea", "rain"]


def random_images(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (number, 48, 40, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return small_clip(tmp_path_factory.mktemp("clip"))


def by_transformers(folder, images: np.ndarray) -> torch.Tensor:
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    scores = []
    for image, prompt in zip(images, PROMPTS, strict=True):
        tokens = processor.tokenizer(prompt).input_ids
        tokens = tokens[: LONGEST - 1] + tokens[-1:] if len(tokens) > LONGEST else tokens
        pixels = processor.image_processor(Image.fromarray(image), return_tensors="pt")
        with torch.no_grad():
            found = model(input_ids=torch.tensor([tokens]), **pixels)
        scores.append(100 * torch.cosine_similarity(found.image_embeds, found.text_embeds))
    return torch.cat(scores)


@pytest.mark.parametrize(("batch", "sign"), [(2, 1), (16, -1)])
def test_clip_score_is_the_mean_cosine_but_not_below_zero(clip_folder, tmp_path, monkeypatch, batch, sign):
    from transformers import CLIPModel, CLIPProcessor

    monkeypatch.setattr(network_scores, "BATCH", batch)
    model = CLIPModel.from_pretrained(clip_folder)
    model.visual_projection.weight.data *= sign
    model.save_pretrained(tmp_path)
    CLIPProcessor.from_pretrained(clip_folder).save_pretrained(tmp_path)
    images = random_images(3)
    expected = by_transformers(tmp_path, images)
    assert expected.mean() * sign > 1  # else the test would not tell the two apart
    assert CLIP_SCORE.compute(images, PROMPTS, tmp_path) == {
        "value": pytest.approx(max(0.0, expected.mean().item()), abs=1e-4), "reason": None, "images": 3,
        "values": pytest.approx(expected.tolist(), abs=1e-4), "network": {"layers": 1, "width": 16, "patch": 16},
    }  # fmt: skip


def test_what_has_no_score_has_a_reason(clip_folder, tmp_path, monkeypatch):
    CLIP_SCORE.opener(clip_folder)
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="has no model.safetensors or"):
        CLIP_SCORE.opener(tmp_path)
    for file in clip_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    monkeypatch.setattr(text_image, "cosines", lambda model, pixels, tokens: torch.full((len(pixels),), torch.nan))
    absent, cut = (tmp_path / "absent", "has no config.json"), (tmp_path, "cannot be loaded as a CLIPModel")
    for folder, reason in (absent, cut, (clip_folder, "NaN")):
        found = CLIP_SCORE.compute(random_images(3), PROMPTS, folder)
        assert found["value"] is None and found["values"] == [None] * 3 and reason in found["reason"]
        json.dumps(found, allow_nan=False)


@pytest.fixture
def small_inception(monkeypatch):
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 20)
    monkeypatch.setattr("sd_quant_scores.inception.inception", Means)


@pytest.fixture
def folder(tmp_path):
    for index, image in enumerate(random_images(30, seed=1)):
        Image.fromarray(image).save(tmp_path / f"{index:02}.png")
    (tmp_path / "captions.txt").touch()
    return tmp_path


def test_fid_is_that_of_torchmetrics_from_a_folder_and_from_its_statistics(small_inception, folder, tmp_path):
    theirs = FrechetInceptionDistance(Means())
    for seed, number, real in ((1, 30, True), (0, 24, False)):
        theirs.update(torch.tensor(random_images(number, seed)).permute(0, 3, 1, 2), real=real)
    found = fid(random_images(24), folder)
    assert found["value"] == pytest.approx(theirs.compute().item(), rel=1e-4)
    assert (found["reason"], found["images"], found["network"]) == (None, 24, "inception-2015-12-05")
    features = Means()(torch.tensor(random_images(30, seed=1)).permute(0, 3, 1, 2)).double().numpy()
    np.savez(tmp_path / "val.npz", mu=features.mean(0), sigma=np.cov(features, rowvar=False))
    again = fid(random_images(24), tmp_path / "val.npz")
    assert (again["value"], again["references"]) == (pytest.approx(found["value"], rel=1e-6), "val.npz")


def test_what_is_broken_or_too_few_and_an_add_on_that_fails_give_a_reason(small_inception, folder, monkeypatch):
    images = random_images(24)
    for mu, sigma in (
        (np.zeros(12), None), (np.zeros(12), np.zeros((12, 11))), (np.zeros(12), np.full((12, 12), np.nan)),
        (np.float64(0), np.zeros((1, 1))), (np.zeros(5), np.eye(5)), (np.array([None]), np.eye(1)),
    ):  # fmt: skip
        np.savez(folder / "broken.npz", mu=mu, **({} if sigma is None else {"sigma": sigma}))
        found = fid(images, folder / "broken.npz")
        assert found["value"] is None and "broken.npz" in found["reason"]
        assert re.search(r"; [a-zI ]+$", found["reason"])  # a whole sentence, whose end is the advice
    (folder / "broken.npz").write_bytes(b"PK\3\4")
    assert "cannot be read as mu and sigma" in fid(images, folder / "broken.npz")["reason"]
    assert "19 images were made" in fid(images[:19], folder)["reason"]
    with monkeypatch.context() as patch:
        patch.setattr("sd_quant_scores.inception.inception", lambda: 1 / 0)
        assert "the add-on scores failed (ZeroDivisionError" in fid(images, folder)["reason"]
    for path in folder.glob("[12]*.png"):
        path.unlink()
    assert f"10 images are in {folder}" in fid(images, folder)["reason"]
    (folder / "07.png").write_bytes(b"no image")
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 2)
    assert "07.png cannot be read" in fid(images, folder)["reason"]
    with pytest.raises(ConfigError, match="neither a folder of images nor an .npz"):
        text_image.check_references(folder / "absent.npz")


def test_fid_takes_more_images_than_inception_has_features():
    """Of no more than 2048 the covariance is singular."""
    text_image._check_number(2049, "were made")
    with pytest.raises(ConfigError, match="2048 images were made, which is too few for FID; it takes 2049 or more"):
        text_image._check_number(2048, "were made")


def features(number: int, width: int = 12, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=random)
    return torch.randn(number, width, generator=random) @ mixed + torch.randn(width, generator=random)


def test_the_distance_is_torchmetrics_and_is_right_with_fewer_images_than_features():
    """C^1/2 C'^1/2 has the singular values of the product of the centred features, so their sum is the common trace."""
    one, other = features(20, width=64).double(), features(30, width=64, seed=1).double()
    centred = [(each - each.mean(0)) / (len(each) - 1) ** 0.5 for each in (one, other)]
    common = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    traces = sum(each.square().sum() for each in centred)
    expected = (one.mean(0) - other.mean(0)).square().sum() + traces - 2 * common
    assert frechet_distance(*moments(one), *moments(other)) == pytest.approx(expected.item(), rel=1e-9)
    one, other = moments(features(400)), moments(features(300, seed=1))
    theirs = pytest.approx(_compute_fid(*one, *other).item(), rel=1e-9)
    assert frechet_distance(*one, *other) == theirs == frechet_distance(*other, *one)
    assert frechet_distance(*one, other[0] * torch.nan, other[1]) is None
