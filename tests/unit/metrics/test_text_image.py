import json
import re
import string

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.metrics import text_image
from sd_quant.metrics.text_image import (
    MLPERF_CAPTIONS_SHA256,
    MLPERF_CLIP,
    MLPERF_FID,
    MLPERF_PROTOCOL,
    captions_sha256,
    check_clip_weights,
    check_references,
    clip_score,
    fid,
    mlperf_window,
)

LONGEST = 16  # tokens
PROMPTS = ["a cat", "a dog on a mat in a large old house by the sea", "rain"]


def random_images(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (number, 48, 40, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIP of one layer a side with random weights; its text is read letter by letter."""
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = tmp_path_factory.mktemp("clip")
    tokens = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    start, end = len(tokens) - 2, len(tokens) - 1
    tokenizer = CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    size = {"height": 32, "width": 32}
    CLIPProcessor(CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size), tokenizer).save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(tokens), "max_position_embeddings": LONGEST}
    special = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config=tower | text | special,
            vision_config=tower | {"image_size": 32, "patch_size": 16},
            projection_dim=8,
        )
    )
    model.save_pretrained(folder)
    return folder


def by_transformers(folder, images: np.ndarray) -> torch.Tensor:
    """100 cos of each image and its prompt, one at a time, by CLIPModel's own forward."""
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


@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_clip_score_is_the_mean_cosine_but_not_below_zero(clip_folder, tmp_path, monkeypatch, batch, sign):
    from transformers import CLIPModel, CLIPProcessor

    monkeypatch.setattr(text_image, "BATCH", batch)
    model = CLIPModel.from_pretrained(clip_folder)
    model.visual_projection.weight.data *= sign
    model.save_pretrained(tmp_path)
    CLIPProcessor.from_pretrained(clip_folder).save_pretrained(tmp_path)
    images = random_images(3)
    expected = by_transformers(tmp_path, images)
    assert expected.mean() * sign > 1  # else the test would not tell the two apart
    found = clip_score(images, PROMPTS, tmp_path)
    assert found["value"] == pytest.approx(max(0.0, expected.mean().item()), abs=1e-4)
    assert (found["reason"], found["pictures"]) == (None, 3)
    assert found["network"] == {"layers": 1, "width": 16, "patch": 16}


def test_weights_that_are_damaged_give_a_reason_instead_of_a_number(clip_folder, tmp_path):
    for file in clip_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    found = clip_score(random_images(3), PROMPTS, tmp_path)
    assert found["value"] is None
    assert "cannot be loaded as a CLIPModel" in found["reason"]


def test_nan_becomes_a_reason(clip_folder, monkeypatch):
    monkeypatch.setattr(
        text_image.ProjectedClip, "get_image_features", lambda self, pixels: torch.full((len(pixels), 8), torch.nan)
    )
    found = clip_score(random_images(3), PROMPTS, clip_folder)
    assert found["value"] is None and "NaN" in found["reason"]
    json.dumps(found, allow_nan=False)


def test_a_folder_is_checked_before_anything_is_loaded(clip_folder, tmp_path):
    check_clip_weights(clip_folder)
    assert clip_score(random_images(3), PROMPTS, tmp_path / "absent")["reason"].startswith("there is no folder")
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="has no model.safetensors or"):
        check_clip_weights(tmp_path)


def test_every_image_needs_a_prompt_and_there_has_to_be_one(clip_folder):
    with pytest.raises(ArtifactError, match="2 images came with 3 prompts"):
        clip_score(random_images(2), PROMPTS, clip_folder)
    with pytest.raises(ArtifactError, match="expected uint8"):
        clip_score(random_images(3).astype(np.float32), PROMPTS, clip_folder)
    assert clip_score(random_images(0), [], clip_folder)["reason"] == "there are no images"


class Means(nn.Module):
    """12 features of an image: the means of its quarters' channels."""

    num_features = 12

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(pixels.float(), 2).flatten(1)


@pytest.fixture
def small_inception(monkeypatch):
    monkeypatch.setattr(text_image, "FEWEST_FOR_FID", 20)
    monkeypatch.setattr(text_image, "_inception", lambda weights: Means())


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
    expected = theirs.compute().item()
    found = fid(random_images(24), folder, tmp_path / "weights.pth")
    assert found["value"] == pytest.approx(expected, rel=1e-4)
    assert (found["reason"], found["pictures"]) == (None, 24)

    features = Means()(torch.tensor(random_images(30, seed=1)).permute(0, 3, 1, 2)).double().numpy()
    np.savez(tmp_path / "val.npz", mu=features.mean(0), sigma=np.cov(features, rowvar=False))
    again = fid(random_images(24), tmp_path / "val.npz", tmp_path / "weights.pth")
    assert again["value"] == pytest.approx(found["value"], rel=1e-6)
    assert again["references"] == "val.npz"


@pytest.mark.parametrize(
    "stored",
    [
        {"mu": np.zeros(12)},
        {"mu": np.zeros(12), "sigma": np.zeros((12, 11))},
        {"mu": np.zeros(12), "sigma": np.full((12, 12), np.nan)},
        {"mu": np.float64(0), "sigma": np.zeros((1, 1))},
        {"mu": np.zeros(5), "sigma": np.eye(5)},
        {"mu": np.array([None]), "sigma": np.eye(1)},
    ],
)
def test_statistics_that_are_broken_give_a_reason(small_inception, tmp_path, stored):
    np.savez(tmp_path / "broken.npz", **stored)
    found = fid(random_images(24), tmp_path / "broken.npz", tmp_path)
    assert found["value"] is None and "broken.npz" in found["reason"]
    assert re.search(r"; [a-zI ]+$", found["reason"])  # a whole sentence, whose end is the advice


def test_a_broken_reference_and_a_broken_archive_give_a_reason(small_inception, folder):
    (folder / "07.png").write_bytes(b"no image")
    assert "07.png cannot be read" in fid(random_images(24), folder, folder)["reason"]
    (folder / "cut.npz").write_bytes(b"PK\3\4")
    assert "cannot be read as mu and sigma" in fid(random_images(24), folder / "cut.npz", folder)["reason"]


def test_too_few_images_give_a_reason(small_inception, folder):
    assert "19 images were made" in fid(random_images(19), folder, folder)["reason"]
    for path in list(folder.glob("1*.png")) + list(folder.glob("2*.png")):
        path.unlink()
    assert f"10 images are in {folder}" in fid(random_images(24), folder, folder)["reason"]
    with pytest.raises(ConfigError, match="neither a folder of images nor an .npz"):
        check_references(folder / "absent.npz")


def test_fid_takes_more_images_than_inception_has_features():
    """Of no more than 2048 the covariance is singular."""
    text_image._check_number(2049, "were made")
    with pytest.raises(ConfigError, match="2048 images were made, which is too few for FID; it takes 2049 or more"):
        text_image._check_number(2048, "were made")


def test_inceptions_weights_are_never_unpickled_unsafely(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no file"):
        text_image._inception(tmp_path / "absent.pth")
    torch.save({"weight": Means()}, tmp_path / "code.pth")
    with pytest.raises(ArtifactError, match="not a plain file of tensors"):
        text_image._inception(tmp_path / "code.pth")


def test_without_torch_fidelity_the_reason_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pth")
    with pytest.raises(ResourceError, match=r"pip install 'sd-quant\[fid\]'"):
        text_image._inception(tmp_path / "weights.pth")


@pytest.fixture
def protocol(monkeypatch) -> dict:
    prompts = ["A cat.", "A dog."]
    monkeypatch.setattr(text_image, "MLPERF_CAPTIONS_SHA256", captions_sha256(prompts[::-1]))
    return {"prompts": prompts, **MLPERF_PROTOCOL}


@pytest.mark.parametrize(
    ("score", "distance", "passes"),
    [
        (31.75, 23.5, True),
        (MLPERF_CLIP[0], MLPERF_FID[1], True),
        (31.686, 23.5, False),
        (31.75, 23.9501, False),
        (31.82, 22.9, False),
    ],
)
def test_both_have_to_be_in_mlperfs_window(protocol, score, distance, passes):
    found = mlperf_window(score, distance, protocol)
    assert found["passes"] is passes
    assert (found["reason"] is None) is passes


def test_the_window_is_what_mlperf_makes_of_its_reference():
    assert MLPERF_CLIP == pytest.approx([31.74981837 * factor for factor in (0.998, 1.002)], abs=1e-8)
    assert MLPERF_FID == pytest.approx([23.48046692 * factor for factor in (0.98, 1.02)], abs=1e-8)


@pytest.mark.parametrize("name", [*MLPERF_PROTOCOL, "prompts"])
def test_another_protocol_neither_passes_nor_fails(protocol, name):
    found = mlperf_window(31.75, 23.5, protocol | {name: ["A cow."] if name == "prompts" else None})
    assert found["passes"] is None
    assert name in found["reason"] and found["reason"].count(" instead of ") == (name != "prompts")
    del protocol[name]
    assert mlperf_window(31.75, 23.5, protocol)["passes"] is None


def test_without_a_number_nothing_passes(protocol):
    assert mlperf_window(None, 23.5, protocol) == {"passes": None, "reason": "there is no CLIP score"}
    assert mlperf_window(None, None, protocol)["reason"] == "there is no CLIP score and no FID"
    assert len(MLPERF_CAPTIONS_SHA256) == 64
