import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.metrics import network_scores
from sd_quant_scores import DINO
from tests.preference_networks import small_dino

pytestmark = pytest.mark.commit


def images(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in ((64, 64), (90, 70), (64, 64))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small_dino(tmp_path_factory.mktemp("dino"))
    return tmp_path_factory.getbasetemp() / "dino0"


def test_it_is_one_less_the_cosine_of_transformers_pooled_features(folder, monkeypatch):
    from transformers import AutoImageProcessor, Dinov2Model

    monkeypatch.setattr(network_scores, "BATCH", 2)
    model, processor = Dinov2Model.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)

    def feature(image: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return model(**processor(Image.fromarray(image), return_tensors="pt")).last_hidden_state[:, 0]

    expected = [
        1 - torch.cosine_similarity(feature(a), feature(b)).item() for a, b in zip(images(0), images(1), strict=True)
    ]
    found = DINO.compute(images(0), images(1), folder)
    assert found["values"] == pytest.approx(expected, abs=1e-5) and min(expected) > 1e-3
    assert found["value"] == pytest.approx(np.mean(expected), abs=1e-5) and found["reason"] is None
    assert DINO.compute(images(0), images(0), folder)["values"] == pytest.approx([0] * 3, abs=1e-6)


def test_another_network_is_refused_with_what_is_wanted(folder, tmp_path):
    DINO.opener(shutil.copytree(folder, tmp_path, dirs_exist_ok=True))
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
def test_junk_in_a_folder_is_the_reason_why_there_is_no_score(folder, tmp_path, name, junk, reason):
    changed = shutil.copytree(folder, tmp_path / "changed") / name
    changed.write_text(json.dumps(json.loads(changed.read_text()) | junk))
    assert re.search(reason, DINO.compute(images(0), images(1), changed.parent)["reason"])
