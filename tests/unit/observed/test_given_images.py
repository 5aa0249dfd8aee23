"""Images among the arguments of a call: each prompt has its own, in batches, in cropped shapes and in keys."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sd_quant.calibration import hooks
from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.files.images import fitted, identities, kinds
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import key_of
from tests.zoo import CASES

pytestmark = pytest.mark.commit

PROMPTS = ["a red bicycle", "a blue door"]
WIDTH, HEIGHT = 96, 64
TOGETHER = {  # whether two prompts may share a batch
    "FluxKontextPipeline": False, "FluxFillPipeline": True, "StableDiffusion3Img2ImgPipeline": True,
    "WanImageToVideoPipeline": False,
}  # fmt: skip


def pictures(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[Image.Image]:
    drawn = np.random.default_rng(3).integers(0, 256, (count, height, width, 3), np.uint8)
    return list(map(Image.fromarray, drawn))


@pytest.mark.parametrize("case", TOGETHER)
def test_each_prompt_has_the_image_of_its_own_row(observe, case):
    """Of one row they are diffusers', as `test_pipeline` finds."""
    checkpoint, known = observe(case), CASES[case]
    rows = [{"image": each} for each in pictures(2, known.width, known.height)]
    sampling = Sampling(4, 3.0, known.height, known.width, 1, 5, arguments=rows)
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    made = pipeline(PROMPTS, sampling)
    for number, prompt in enumerate(PROMPTS):
        alone = pipeline([prompt], replace(sampling, seed=5 + number, arguments=[rows[number]]))
        assert np.array_equal(alone.images[0], made.images[number])
    exchanged = pipeline(PROMPTS, replace(sampling, arguments=rows[::-1]))
    assert not np.array_equal(made.images[0], exchanged.images[0]), "the image is read"
    observed = checkpoint.observation
    assert observed.parts["vae_encoder"].component == "vae" and observed.parts["vae_encoder"].rung.method == "encode"
    assert observed.style.keeps == (("image",) if case == "FluxKontextPipeline" else ())
    assert (observed.unequal is None) == TOGETHER[case]
    if TOGETHER[case]:
        of_both = pipeline(PROMPTS, replace(sampling, batch_size=2))
        assert np.abs(of_both.images.astype(int) - made.images).max() <= 1


@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_a_share_of_the_steps_has_as_many_rows_and_its_own_ranges(observe, monkeypatch, strength):
    monkeypatch.setattr(hooks, "ROWS", 8)
    checkpoint = observe("StableDiffusion3Img2ImgPipeline")
    rows = [{"image": each, "strength": strength} for each in pictures(2)]
    sampling, layer = Sampling(8, 3.0, HEIGHT, WIDTH, 1, 5, arguments=rows), "transformer_blocks.0.attn.to_q"
    found = calibrate(Pass(load_model(checkpoint), [layer], PROMPTS, sampling), fabric_for("cpu"), checkpoint_sha256="")
    assert len(found.layers[layer].rows.priority) == 8
    assert len(found.layers[layer].amax) == 8 * strength and found.layers[layer].amax.amax(1).all()
    assert not observe("FluxKontextPipeline").family.SOME_STEPS, "it takes all of them"


def test_images_of_an_own_shape_are_cropped_and_known_by_what_they_show():
    (wide,) = pictures(1, 40, 20)
    assert fitted([wide, 3, "a"], 16, 16)[0].size == (16, 16) and fitted([wide, 3, "a"], 16, 16)[1:] == [3, "a"]
    assert fitted(wide, 40, 20) is wide
    given = {"image": wide, "images": [wide, wide], "count": 3}
    assert kinds(given) == {"image": "image RGB", "images": ["image RGB"] * 2, "count": 3}
    assert identities(given) != identities(given | {"image": fitted(wide, 40, 40)})


def test_batches_share_numbers_and_lists_of_images_come_alone():
    one, two, three = pictures(3)
    rows = [{"image": one, "strength": 0.5}, {"image": two, "strength": 0.5}, {"image": three, "strength": 0.7}]
    sampling = Sampling(2, 3.0, HEIGHT, WIDTH, 4, 5, arguments=rows)
    assert sampling.batches(range(4)) == [[0, 1, 3], [2]]
    assert sampling.arguments_of([0, 1, 3]) == {"image": [one, two, one], "strength": 0.5}
    assert sampling.arguments_of([2]) == rows[2]
    named = replace(sampling, arguments=[{"prompt_2": "a", "mode": "x"}, {"prompt_2": "b", "mode": "x"}])
    assert named.arguments_of([0, 1]) == {"prompt_2": ["a", "b"], "mode": "x"}, "no pipeline takes a list of options"
    modes = replace(sampling, arguments=[{"mode": "x"}, {"mode": "y"}])
    assert modes.batches(range(4)) == [[0, 2], [1, 3]]
    listed = replace(sampling, arguments=[{"image": [one, two]}])
    assert listed.batches(range(2)) == [[0], [1]]
    assert sampling.described() != replace(sampling, arguments=rows[::-1]).described()
    assert "arguments" not in replace(sampling, arguments=None).described()
    assert sampling.texts_of(["a", "a"])[0] != sampling.texts_of(["a", "a"])[1], "statistics of both are kept apart"


def test_key_of_a_checkpoint_has_its_images(observe):
    checkpoint = observe("StableDiffusion3Img2ImgPipeline")
    first, second = (replace(checkpoint, arguments={"image": each}) for each in pictures(2))
    assert key_of(first) != key_of(second) and "0x" not in key_of(first)
