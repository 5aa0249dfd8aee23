"""ImageReward against its formula in a few functions of torch, on weights under the authors' names.

The authors' package asks for transformers before 5 and cannot be installed beside it.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics import network_scores
from sd_quant_scores import IMAGE_REWARD as REWARD
from sd_quant_scores import image_reward
from tests.preference_networks import TEXT, VISION, VOCABULARY, image_reward_by_formula, small_image_reward

pytestmark = pytest.mark.commit

IMAGES = [
    np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    for seed, size in enumerate(((64, 64), (301, 200), (225, 333)))
]
PROMPTS = ["A be [SEP]", "c " * 50, "zé"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
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
    found = (middle - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    return torch.tensor(found, dtype=torch.float32).permute(2, 0, 1)


def tokens(words: list[str]) -> torch.Tensor:
    """A text of at most 35 tokens with its marks, padded with 0."""
    found = [VOCABULARY.index(word) for word in ("[CLS]", *words, "[SEP]")]
    return torch.tensor(found + [0] * (35 - len(found)))


def test_it_is_the_formula_on_the_authors_weights(folder, monkeypatch):
    monkeypatch.setattr(network_scores, "BATCH", 2)
    found = REWARD.compute(IMAGES, PROMPTS, folder)
    state = torch.load(folder / "ImageReward.pt")
    words = [["a", "b", "##e", "[SEP]"], ["c"] * 33, ["z", "##e"]]
    expected = image_reward_by_formula(
        state, torch.stack([pixels(image) for image in IMAGES]), torch.stack([tokens(each) for each in words])
    )
    assert found["values"] == pytest.approx(expected.tolist(), abs=1e-4) and np.ptp(expected.numpy()) > 0.1
    assert found["value"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert (found["reason"], found["images"], found["weights"]) == (None, 3, "ImageReward.pt")


def test_a_folder_of_another_network_is_refused_with_what_is_wanted(folder, monkeypatch):
    REWARD.opener(folder)
    wanted = r"name a folder with ImageReward.pt of THUDM/ImageReward \(1.79 GB, Apache-2.0\) and vocab.txt .*"
    monkeypatch.setattr(image_reward, "VISION", VISION | {"num_hidden_layers": 3})
    with pytest.raises(ArtifactError, match=rf"12 missing: blip.visual_encoder.blocks.2.*; {wanted}"):
        REWARD.opener(folder)
    monkeypatch.setattr(image_reward, "VISION", VISION)
    (folder / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(ArtifactError, match=rf"has 1 tokens, expected the {len(VOCABULARY)} of bert-.*; {wanted}"):
        REWARD.opener(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match=f"has no vocab.txt, expected .*; {wanted}"):
        REWARD.opener(folder)
    found = REWARD.compute(IMAGES, PROMPTS, folder)
    assert found["value"] is None and "has no vocab.txt" in found["reason"]
