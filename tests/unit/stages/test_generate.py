"""What the knobs of ``infer`` say of images."""

import pytest
from PIL import Image

from sd_quant.stages.generate import keep_prompts, sampling_of
from tests.presets import infer_job

pytestmark = [pytest.mark.commit, pytest.mark.slow]

PROMPTS = "infer.prompts=[a cat, a dog]"


def test_negative_prompts_are_those_of_the_images():
    sampling = sampling_of(infer_job(PROMPTS, "infer.negative_prompt=[rain, nude]", "infer.num_samples=2").infer)
    assert sampling.negative_prompts == ["rain", "rain", "nude", "nude"] and sampling.latents is None


def test_condition_images_come_in_turn_for_each_sample_of_a_prompt(tmp_path):
    for number, name in enumerate("abc"):
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / f"{name}.png")
    knobs = PROMPTS, f"infer.control=[{tmp_path},{tmp_path}/a.png]", "infer.num_samples=2"
    infer = infer_job(*knobs).infer
    assert len(infer.prompt_list()) == 6 and sampling_of(infer_job(PROMPTS).infer).arguments is None
    rows = [[image.getpixel((0, 0))[0] for image in row["image"]] for row in sampling_of(infer).arguments]
    assert rows == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 0], [2, 0]]


def test_drawn_prompts_are_kept_and_whole_texts_are_not(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na fox\n")
    (tmp_path / "prompts.csv").write_text("Prompts,Category\na cat,Animals\n'5' on a door,Text\n")
    for name, knobs, kept in (
        ("prompts.txt", (), None),
        ("prompts.txt", ("infer.num_prompts=2",), ["Prompt"]),
        ("prompts.csv", (), ["Prompt\tCategory", "a cat\tAnimals", "'5' on a door\tText"]),
    ):
        infer = infer_job(f"infer.prompts={tmp_path / name}", *knobs).infer
        keep_prompts(infer, tmp_path)
        file = tmp_path / "prompts.tsv"
        assert (file.read_text().splitlines()[: len(kept)] == kept) if kept else not file.exists()
        if kept:
            again = infer_job(f"infer.prompts={file}").infer
            assert (again.prompt_list(), again.categories()) == (infer.prompt_list(), infer.categories())
