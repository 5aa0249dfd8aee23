"""Images by which formats are chosen are those of calibration."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from PIL import Image

from sd_quant.stages import chosen_by_images as stage
from tests.presets import job

pytestmark = pytest.mark.commit


def test_formats_are_chosen_by_calibrations_condition_images_and_not_by_those_of_the_job(tmp_path, monkeypatch):
    for number in range(6):
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "config.json").touch()
    net, of_job = f"model.controlnets=[{tmp_path}]", f"infer.control=[{tmp_path}]"
    asked = job("infer.prompts=[a]", net, of_job, f"model.calibration_control=[{tmp_path}/5.png]")
    made = Mock(return_value=([], {}))
    monkeypatch.setattr(stage, "images_of", made)
    stage.image_errors(SimpleNamespace(model=asked.model, infer=asked.infer, recipe=asked.quantize))
    _, infer, sampling, *_ = made.call_args.args
    assert len(infer.prompt_list()) == stage.PROMPTS
    assert [row["image"].getpixel((0, 0)) for row in sampling.arguments] == [(5, 0, 0)]
