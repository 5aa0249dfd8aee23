"""Pipelines that take images: what is observed of them, and that their images are diffusers' own, bit for bit."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.cache import Cache
from sd_quant.files.given_images import fitted, identities, kinds
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import key_of
from sd_quant.observed import observing
from sd_quant.observed.checkpoint import ObservedCheckpoint
from sd_quant.observed.part import Rung
from sd_quant.observed.watching import Asked

from .given import BUILT, built

pytestmark = pytest.mark.commit

PROMPTS = ["a red bicycle", "a blue door"]
WIDTH, HEIGHT = 96, 64


def pictures(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[Image.Image]:
    drawn = np.random.default_rng(3).integers(0, 256, (count, height, width, 3), np.uint8)
    return list(map(Image.fromarray, drawn))


def call(name: str, image: Image.Image) -> dict[str, Image.Image]:
    mask = Image.fromarray(np.repeat(np.uint8([[0, 255]]), WIDTH // 2, axis=1).repeat(HEIGHT, axis=0))
    return {"image": image} | ({"mask_image": mask} if name == "fill" else {})


@pytest.fixture(scope="module")
def observe(tmp_path_factory) -> Callable[[str], ObservedCheckpoint]:
    """``observe(name)``: the pipeline, watched with an image, with no network exported."""

    def opened(name: str) -> ObservedCheckpoint:
        folder = tmp_path_factory.mktemp("given") / name.replace(" ", "_")
        built(name).save_pretrained(folder)
        with pytest.MonkeyPatch.context() as patch:
            refused = lambda *_, method="forward", **__: Rung("refused", method=method, cause="not tried")  # noqa: E731
            patch.setattr(observing, "climb", refused)
            asked = Asked(WIDTH, HEIGHT, 3.0, BUILT[name][1], call(name, *pictures(1)))
            return observing.open_observed(folder, asked, (), None, Cache(None))

    return opened


def theirs(name: str, prompt: str, image: Image.Image, seed: int) -> np.ndarray:
    pipe = built(name)
    torch.manual_seed(seed)
    given = {
        "prompt": [prompt], **call(name, image), "width": WIDTH, "height": HEIGHT, "num_inference_steps": 2,
        "guidance_scale": 3.0, "output_type": "np", "max_area": WIDTH * HEIGHT,
        "generator": [torch.Generator().manual_seed(seed)], **BUILT[name][1],
    }  # fmt: skip
    known = inspect.signature(type(pipe).__call__).parameters
    made = np.asarray(pipe(**{key: value for key, value in given.items() if key in known})[0])[0]
    frames = (made if made.ndim == 4 else made[None]) * 255
    return np.concatenate(list(frames.round().astype(np.uint8)), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_images_of_images_are_those_of_diffusers_bit_for_bit(observe, name):
    checkpoint, given = observe(name), pictures(2)
    sampling = Sampling(2, 3.0, HEIGHT, WIDTH, 1, 5, arguments=[call(name, each) for each in given])
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    made = pipeline(PROMPTS, sampling)
    for number, (prompt, image) in enumerate(zip(PROMPTS, given, strict=True)):
        expected = theirs(name, prompt, image, 5 + number)
        assert np.array_equal(made.images[number], expected)
    exchanged = pipeline(PROMPTS, replace(sampling, arguments=sampling.arguments[::-1]))
    assert not np.array_equal(made.images[0], exchanged.images[0]), "the image is read"
    observed = checkpoint.observation
    assert observed.parts["vae_encoder"].component == "vae" and observed.parts["vae_encoder"].rung.method == "encode"
    assert observed.style.keeps == (("image",) if name == "kontext" else ())
    together = name in ("image to image", "fill")
    assert (observed.unequal is None) == together
    if together:
        of_both = pipeline(PROMPTS, replace(sampling, batch_size=2))
        assert np.abs(of_both.images.astype(int) - made.images).max() <= 1


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


@pytest.mark.slow
def test_key_of_a_checkpoint_has_its_images(observe):
    checkpoint = observe("image to image")
    first, second = (replace(checkpoint, arguments={"image": each}) for each in pictures(2))
    assert key_of(first) != key_of(second) and "0x" not in key_of(first)
