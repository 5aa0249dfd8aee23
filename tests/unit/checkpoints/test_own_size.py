import json
from pathlib import Path

import pytest

from sd_quant.checkpoints.own_size import own_size
from sd_quant.places import HOME

NEMO = "unet_config: {{image_size: {0}}}\nfirst_stage_config: {{ddconfig: {{resolution: {1}}}}}\n"


def folder(path: Path, denoiser: str, config: object) -> Path:
    (path / denoiser).mkdir(parents=True)
    (path / "model_index.json").write_text("{}")
    (path / denoiser / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def archive(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "model_config.yaml").write_text(config)
    return path


@pytest.mark.parametrize(
    ("made", "size"),
    [
        (lambda path: folder(path, "unet", {"sample_size": 128}), (1024, 1024)),
        (lambda path: folder(path, "transformer", {"sample_size": [64, 96]}), (512, 768)),
        (lambda path: folder(path, "unet", {}), None),
        (lambda path: folder(path, "unet", {"sample_size": 64.0}), None),  # which no knob takes either
        (lambda path: folder(path, "unet", {"sample_size": "1000"}), None),
        (lambda path: folder(path, "unet", {"sample_size": 10**12}), None),
        (lambda path: folder(path, "unet", {"sample_size": 60}), None),  # 480 pixels, which no knob takes
        (lambda path: folder(path, "unet", {"sample_size": [1, 2, 3]}), None),
        (lambda path: folder(path, "unet", "["), None),
        (lambda path: archive(path, NEMO.format(8, 64)), (64, 64)),
        (lambda path: archive(path, "model:\n  " + NEMO.format(8, 64).replace("\nf", "\n  f")), (64, 64)),
        (lambda path: archive(path, NEMO.format(64, 256)), None),  # SDXL's own, where neither is meant
        (lambda path: archive(path, "nothing: 1"), None),
        (lambda path: path, None),  # which is not there
        (lambda path: HOME / "checkpoints/sdxl_mini.nemo", (64, 64)),
    ],
)
def test_what_a_checkpoint_says_of_its_images(tmp_path, made, size):
    assert own_size(made(tmp_path / "checkpoint")) == size


def test_other_files_say_nothing(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    (tmp_path / "broken.nemo").write_bytes(bytes(1024))
    assert own_size(tmp_path / "one.safetensors") is None and own_size(tmp_path / "broken.nemo") is None
