"""Scores by networks against their authors' code or formulas.

PickScore against its example, HPSv2 against OpenCLIP's network in torch's own layers, DINOv2 against transformers, and
ImageReward, whose package asks for transformers before 5, against its formula on weights under the authors' names.
"""

import gc
import json
import re
import shutil
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics import network_scores
from sd_quant_scores import DINO, HPS, image_reward, preference
from sd_quant_scores import IMAGE_REWARD as REWARD
from sd_quant_scores import PICKSCORE as PICK_SCORE
from tests.preference_networks import (
    CLIP_SIZES,
    CLIP_WIDTH,
    TEXT,
    VISION,
    VOCABULARY,
    image_reward_by_formula,
    small_dino,
    small_hps,
    small_image_reward,
)  # fmt: skip
from tests.text_scores import LONGEST, small_clip

pytestmark = pytest.mark.commit

PROMPTS = ["a cat", "a dog on a mat in a large old house by the sea", "rain"]
SIZES = ((64, 48), (300, 200), (224, 224))
# By HPSv2's own tokenizer (1.2.0): `“`, `&amp;` and ` ’ ` are mended first, and the end marker stays.
TOKENS = {
    "a photo of a cat": [49406, 320, 1125, 539, 320, 2368, 49407],
    "A &amp;amp; “B”’s": [49406, 320, 261, 257, 321, 31065, 338, 49407],
}


def images(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, (height, width, 3), dtype=np.uint8) for height, width in SIZES]


@pytest.fixture(scope="module")
def pick_folder(tmp_path_factory):
    from transformers import CLIPModel

    folder = small_clip(tmp_path_factory.mktemp("pick"))
    model = CLIPModel.from_pretrained(folder)
    model.logit_scale.data.fill_(1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(preference, "VIT_H_14", CLIP_SIZES)
    monkeypatch.setattr(preference, "WIDTH", CLIP_WIDTH)


def in_clips_colours(image: np.ndarray) -> torch.Tensor:
    found = (image - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    return torch.tensor(found, dtype=torch.float32).permute(2, 0, 1)


@pytest.mark.parametrize("batch", [2, 16])
@torch.no_grad()
def test_pick_score_is_the_scaled_cosine_of_its_authors_example(pick_folder, monkeypatch, batch):
    """PickScore's README, an image at a time."""
    from transformers import CLIPModel, CLIPProcessor

    vision = {"hidden_size": 16, "num_hidden_layers": 1, "patch_size": 16}
    monkeypatch.setattr(preference, "VIT_H_14", {"vision_config": vision})
    monkeypatch.setattr(network_scores, "BATCH", batch)
    found, expected = PICK_SCORE.compute(images(), PROMPTS, pick_folder), []
    model, processor = CLIPModel.from_pretrained(pick_folder).eval(), CLIPProcessor.from_pretrained(pick_folder)
    for image, prompt in zip(images(), PROMPTS, strict=True):
        pixels = processor(images=Image.fromarray(image), return_tensors="pt")
        tokens = processor(text=prompt, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        one = model.get_image_features(**pixels).pooler_output
        two = model.get_text_features(**tokens).pooler_output
        one, two = one / torch.norm(one, dim=-1, keepdim=True), two / torch.norm(two, dim=-1, keepdim=True)
        expected.append((model.logit_scale.exp() * (two @ one.T)[0]).item())
    assert found["values"] == pytest.approx(expected, abs=1e-5) and max(map(abs, expected)) > 0.5
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert (found["reason"], found["images"], found["weights"]) == (None, 3, pick_folder.name)


def padded(image: np.ndarray) -> torch.Tensor:
    """The longer side resized to 224 by Pillow in floating point, black beside it, in CLIP's colours."""
    height, width = (round(side * 224 / max(image.shape[:2])) for side in image.shape[:2])
    whole = np.zeros((224, 224, 3), np.float32)
    top, left = (224 - height) // 2, (224 - width) // 2
    for colour in range(3):
        plane = Image.fromarray(image[..., colour].astype(np.float32) / 255)
        resized = plane.resize((width, height), Image.Resampling.BICUBIC)
        whole[top : top + height, left : left + width, colour] = np.asarray(resized)
    return in_clips_colours(whole)[None]


@torch.no_grad()
def test_hps_is_a_hundred_times_the_cosine_of_open_clips_network(small, tmp_path, monkeypatch):
    monkeypatch.setattr(network_scores, "BATCH", 2)
    network = small_hps(tmp_path / "HPS_v2_compressed.pt")
    prompts, made, empty = [*PROMPTS[:2], "a cat " * 60], [], preference.empty_hps

    def watched(weights):
        model, read = empty(weights)
        made.append(weakref.ref(model))
        return model, read

    monkeypatch.setattr(preference, "empty_hps", watched)
    gc.disable()
    try:
        found = HPS.compute(images(), prompts, tmp_path / "HPS_v2_compressed.pt")
        assert made[0]() is None, "each network is let go before the next"
    finally:
        gc.enable()
    tokenizer, expected = preference.clip_tokenizer(), []
    for image, prompt in zip(images(), prompts, strict=True):
        tokens = tokenizer(prompt)["input_ids"]
        tokens = tokens[:76] + tokens[-1:] if len(tokens) > 77 else tokens
        tokens = torch.tensor([tokens + [0] * (77 - len(tokens))])
        expected.append(100 * torch.cosine_similarity(network.image(padded(image)), network.text(tokens)).item())
    assert found["values"] == pytest.approx(expected, abs=1e-3) and np.ptp(expected) > 5
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-3)
    assert found["weights"] == "HPS_v2_compressed.pt"


@pytest.mark.parametrize("prompt", TOKENS)
def test_a_prompt_is_read_as_by_open_clip(prompt):
    assert preference.clip_tokenizer()(preference.cleaned(prompt))["input_ids"] == TOKENS[prompt]


def test_other_files_are_refused_with_what_is_wanted(small, tmp_path, pick_folder):
    wanted = r"name HPS_v2.1_compressed.pt or .* \(1.97 GB, Apache-2.0\)$"
    small_hps(tmp_path / "wide.pt", hidden_size=48)
    with pytest.raises(ArtifactError, match=rf"misshapen: visual.class_embedding \[48\] instead of \[24\].*; {wanted}"):
        HPS.opener(tmp_path / "wide.pt")
    small_hps(tmp_path / "deep.pt", num_hidden_layers=3)
    with pytest.raises(ArtifactError, match=rf"12 unknown: visual.transformer.resblocks.2.*; {wanted}"):
        HPS.opener(tmp_path / "deep.pt")
    with pytest.raises(ConfigError, match=f"is no file, expected HPSv2's weights; {wanted}"):
        HPS.opener(tmp_path)
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(ArtifactError, match="expected the zip format of torch.save"):
        HPS.opener(tmp_path / "text.pt")
    with pytest.raises(ArtifactError, match=r"layers 1, width 16, patch 16, expected PickScore's .* 3.94 GB"):
        PICK_SCORE.opener(pick_folder)
    with pytest.raises(ConfigError, match=r"no model.safetensors or .* for PickScore; name a folder .*PickScore_v1"):
        (tmp_path / "config.json").touch()
        PICK_SCORE.opener(tmp_path)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    small_dino(tmp_path_factory.mktemp("dino"))
    return tmp_path_factory.getbasetemp() / "dino0"


def test_dinos_distance_is_one_less_the_cosine_of_transformers_pooled_features(dino, monkeypatch):
    from transformers import AutoImageProcessor, Dinov2Model

    monkeypatch.setattr(network_scores, "BATCH", 2)
    model, processor = Dinov2Model.from_pretrained(dino).eval(), AutoImageProcessor.from_pretrained(dino)

    def feature(image: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return model(**processor(Image.fromarray(image), return_tensors="pt")).last_hidden_state[:, 0]

    expected = [
        1 - torch.cosine_similarity(feature(a), feature(b)).item() for a, b in zip(images(0), images(1), strict=True)
    ]
    found = DINO.compute(images(0), images(1), dino)
    assert found["values"] == pytest.approx(expected, abs=1e-5) and min(expected) > 1e-3
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-5) and found["reason"] is None
    assert DINO.compute(images(0), images(0), dino)["values"] == pytest.approx([0] * 3, abs=1e-6)


def test_another_network_than_dino_is_refused_with_what_is_wanted(dino, tmp_path):
    DINO.opener(shutil.copytree(dino, tmp_path, dirs_exist_ok=True))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "clip"}))
    wanted = r"name a folder with the files of facebook/dinov2-base .*346 MB; Apache-2.0"
    with pytest.raises(ArtifactError, match=f"holds a model of type clip, expected dinov2 or .*; {wanted}"):
        DINO.opener(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"has no model.safetensors, expected .*; {wanted}"):
        DINO.opener(tmp_path)
    assert "has no model.safetensors" in DINO.compute(images(0), images(1), tmp_path)["reason"]


@pytest.mark.parametrize(("name", "junk", "reason"), [
    ("preprocessor_config.json", {"crop_size": {"height": "x", "width": 8}}, "^DINOv2 distance cannot be computed"),
    ("config.json", {"num_hidden_layers": 10**18}, "with 1000000000000000000 layers, .* at most 100; n"),
])  # fmt: skip
def test_junk_in_dinos_folder_is_the_reason_why_there_is_no_score(dino, tmp_path, name, junk, reason):
    changed = shutil.copytree(dino, tmp_path / "changed") / name
    changed.write_text(json.dumps(json.loads(changed.read_text()) | junk))
    assert re.search(reason, DINO.compute(images(0), images(1), changed.parent)["reason"])


BERT_PROMPTS = ["A be [SEP]", "c " * 50, "zé"]


@pytest.fixture
def reward(tmp_path, monkeypatch):
    monkeypatch.setattr(image_reward, "VISION", VISION)
    monkeypatch.setattr(image_reward, "TEXT", TEXT)
    small_image_reward(tmp_path)
    return tmp_path


def pixels(image: np.ndarray) -> torch.Tensor:
    """The shorter side resized to 224 by Pillow, the middle, in CLIP's colours."""
    height, width = image.shape[:2]
    size = (224, int(224 * height / width)) if width < height else (int(224 * width / height), 224)
    resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)) / 255
    top, left = (round((side - 224) / 2) for side in resized.shape[:2])
    middle = resized[top : top + 224, left : left + 224]
    return in_clips_colours(middle)


def tokens(words: list[str]) -> torch.Tensor:
    """A text of at most 35 tokens with its marks, padded with 0."""
    found = [VOCABULARY.index(word) for word in ("[CLS]", *words, "[SEP]")]
    return torch.tensor(found + [0] * (35 - len(found)))


def test_image_reward_is_the_formula_on_the_authors_weights(reward, monkeypatch):
    monkeypatch.setattr(network_scores, "BATCH", 2)
    found = REWARD.compute(images(), BERT_PROMPTS, reward)
    state = torch.load(reward / "ImageReward.pt")
    words = [["a", "b", "##e", "[SEP]"], ["c"] * 33, ["z", "##e"]]
    expected = image_reward_by_formula(
        state, torch.stack([pixels(image) for image in images()]), torch.stack([tokens(each) for each in words])
    )
    assert found["values"] == pytest.approx(expected.tolist(), abs=1e-4) and np.ptp(expected.numpy()) > 0.1
    assert found["value"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert (found["reason"], found["images"], found["weights"]) == (None, 3, "ImageReward.pt")


def test_a_folder_that_is_not_image_rewards_is_refused_with_what_is_wanted(reward, monkeypatch):
    REWARD.opener(reward)
    wanted = r"name a folder with ImageReward.pt of THUDM/ImageReward \(1.79 GB, Apache-2.0\) and vocab.txt .*"
    monkeypatch.setattr(image_reward, "VISION", VISION | {"num_hidden_layers": 3})
    with pytest.raises(ArtifactError, match=rf"12 missing: blip.visual_encoder.blocks.2.*; {wanted}"):
        REWARD.opener(reward)
    monkeypatch.setattr(image_reward, "VISION", VISION)
    (reward / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(ArtifactError, match=rf"has 1 tokens, expected the {len(VOCABULARY)} of bert-.*; {wanted}"):
        REWARD.opener(reward)
    (reward / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match=f"has no vocab.txt, expected .*; {wanted}"):
        REWARD.opener(reward)
    found = REWARD.compute(images(), BERT_PROMPTS, reward)
    assert found["value"] is None and "has no vocab.txt" in found["reason"]
