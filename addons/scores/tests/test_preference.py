"""PickScore against its authors' example code, HPSv2 against OpenCLIP's network as written in torch's own layers."""

import gc
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics import network_scores
from sd_quant_scores import HPS, preference
from sd_quant_scores import PICKSCORE as PICK_SCORE
from tests.preference_networks import CLIP_SIZES, CLIP_WIDTH, small_hps
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


@pytest.fixture
def small_pick(monkeypatch):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "patch_size": 16}
    monkeypatch.setattr(preference, "VIT_H_14", {"vision_config": vision})


def by_their_example(folder) -> list[float]:
    """PickScore's README, an image at a time."""
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    scores = []
    for image, prompt in zip(images(), PROMPTS, strict=True):
        pixels = processor(images=Image.fromarray(image), return_tensors="pt")
        tokens = processor(text=prompt, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            one = model.get_image_features(**pixels).pooler_output
            two = model.get_text_features(**tokens).pooler_output
            one, two = one / torch.norm(one, dim=-1, keepdim=True), two / torch.norm(two, dim=-1, keepdim=True)
            scores.append((model.logit_scale.exp() * (two @ one.T)[0]).item())
    return scores


@pytest.mark.parametrize("batch", [2, 16])
def test_pick_score_is_the_scaled_cosine_of_its_authors_example(pick_folder, small_pick, monkeypatch, batch):
    monkeypatch.setattr(network_scores, "BATCH", batch)
    found = PICK_SCORE.compute(images(), PROMPTS, pick_folder)
    expected = by_their_example(pick_folder)
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
    whole = (whole - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    return torch.tensor(whole, dtype=torch.float32).permute(2, 0, 1)[None]


def test_hps_is_a_hundred_times_the_cosine_of_open_clips_network(small, tmp_path, monkeypatch):
    monkeypatch.setattr(network_scores, "BATCH", 2)
    network = small_hps(tmp_path / "HPS_v2_compressed.pt")
    prompts = [*PROMPTS[:2], "a cat " * 60]
    found = HPS.compute(images(), prompts, tmp_path / "HPS_v2_compressed.pt")
    tokenizer, expected = preference.clip_tokenizer(), []
    for image, prompt in zip(images(), prompts, strict=True):
        tokens = tokenizer(prompt)["input_ids"]
        tokens = tokens[:76] + tokens[-1:] if len(tokens) > 77 else tokens
        tokens = torch.tensor([tokens + [0] * (77 - len(tokens))])
        with torch.no_grad():
            expected.append(100 * torch.cosine_similarity(network.image(padded(image)), network.text(tokens)).item())
    assert found["values"] == pytest.approx(expected, abs=1e-3) and np.ptp(expected) > 5
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-3)
    assert found["weights"] == "HPS_v2_compressed.pt"


@pytest.mark.parametrize("prompt", TOKENS)
def test_a_prompt_is_read_as_by_open_clip(prompt):
    assert preference.clip_tokenizer()(preference.cleaned(prompt))["input_ids"] == TOKENS[prompt]


def test_each_network_is_let_go_before_the_next(small, tmp_path, monkeypatch):
    made, empty = [], preference.empty_hps

    def watched(weights):
        model, read = empty(weights)
        made.append(weakref.ref(model))
        return model, read

    monkeypatch.setattr(preference, "empty_hps", watched)
    small_hps(tmp_path / "hps.pt")
    gc.disable()
    try:
        assert HPS.compute(images(), PROMPTS, tmp_path / "hps.pt")["reason"] is None
        assert made[0]() is None
    finally:
        gc.enable()


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
