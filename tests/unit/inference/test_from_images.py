"""Images from images are those of diffusers' own pipelines for them, from the same folder, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.engines.pool import Pool, Variant
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.inference.source_images import SourceImages
from sd_quant.models import VAE_ENCODER
from sd_quant.models.checkpoint import Checkpoint

from ...pipelines import TINY, redraw

pytestmark = pytest.mark.slow

WIDTH, HEIGHT, STEPS = 128, 64, 5
PROMPTS = ["a red cat", "a house at the end of a long road", "a lamp"]
FAMILIES = ["sd15", "sd21", "sdxl"]
CLASSES = {
    "sd15": (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline),
    "sd21": (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
}


def source(masked: bool, strength: float) -> SourceImages:
    """Two images, so that the third prompt begins with the first again, and their masks."""
    random = np.random.default_rng(0)
    smooth = [np.kron(random.integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3)), np.ones((8, 8, 1))) for _ in range(2)]
    masks = np.zeros((2, HEIGHT, WIDTH), np.uint8)
    masks[0, :32], masks[1, :, 40:100] = 255, 200
    return SourceImages(np.stack(smooth).astype(np.uint8), masks if masked else None, strength)


def for_inpainting(family: str, folder: Path) -> None:
    """As a checkpoint for inpainting is stored: its UNet reads nine channels."""
    TINY[family](folder)
    plain = diffusers.DiffusionPipeline.from_pretrained(folder)
    unet = diffusers.UNet2DConditionModel.from_config(plain.unet.config, in_channels=9)
    redraw(unet)
    known = {**plain.config, **plain.components, "unet": unet}
    kind = CLASSES[family][1]
    names = [name for name in kind._get_signature_types() if name in known]
    kind(**{name: known[name] for name in names}).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str, bool], Path]:
    root = tmp_path_factory.mktemp("from_images")

    @cache
    def folder_of(family: str, inpainting: bool = False) -> Path:
        folder = root / f"{family}_{inpainting}"
        for_inpainting(family, folder) if inpainting else TINY[family](folder)
        return folder

    return folder_of


def opened(folder: Path, family: str) -> Checkpoint:
    return open_checkpoint(folder, family, io=None, max_sequence_length=None, encodes=True)


def sampling_of(given: SourceImages) -> Sampling:
    return Sampling(STEPS, 3.0, HEIGHT, WIDTH, batch_size=2, seed=5, source=given)


def ours(checkpoint: Checkpoint, sampling: Sampling, most: int | None = None) -> Generated:
    engines = load_model(checkpoint).torch_engines()
    pool = Pool(engines.__getitem__, most=most)
    return pipeline_of(checkpoint, Variant(pool, {part: part for part in engines}))(PROMPTS, sampling)


def theirs(folder: Path, kind: type, sampling: Sampling) -> tuple[torch.Tensor, np.ndarray]:
    """The latents after the last step and the images, a prompt at a time, each from its own seed.

    Images are given in the order of memory that engines take: another one is summed up in another order.
    """
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    given, latents, images = sampling.source, [], []
    for number, prompt in enumerate(PROMPTS):
        masks = {} if given.masks is None else {
            "mask_image": Image.fromarray(given.masks[number % 2]), "height": HEIGHT, "width": WIDTH,
        }  # fmt: skip
        image = pipe.image_processor.preprocess(Image.fromarray(given.images[number % 2])).contiguous()
        for output_type, results in (("latent", latents), ("np", images)):
            results.append(
                pipe(
                    prompt, image=image, strength=given.strength,
                    num_inference_steps=STEPS, guidance_scale=3.0, output_type=output_type,
                    generator=[torch.Generator().manual_seed(5 + number)], **masks,
                )[0]
            )  # fmt: skip
    return torch.cat(latents), np.concatenate(images)


def assert_equal(folder: Path, family: str, kind: type, given: SourceImages) -> Generated:
    sampling = sampling_of(given)
    generated = ours(opened(folder, family), sampling)
    latents, images = theirs(folder, kind, sampling)
    taken = int(STEPS * given.strength)
    assert generated.latents.shape[1] >= taken and generated.latents.shape[0] == len(PROMPTS)
    # batches of two on our side and of one on theirs: sums of another order
    assert torch.allclose(generated.latents[:, -1], latents, rtol=0, atol=1e-4 * latents.abs().max())
    assert np.abs(generated.images - (images * 255).round()).max() <= 1
    single = ours(opened(folder, family), replace(sampling, batch_size=1))
    assert torch.equal(single.latents[:, -1], latents)
    assert np.array_equal(single.images, (images * 255).round().astype(np.uint8))
    return generated


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_changed(folder_of, family):
    few, many = (
        assert_equal(folder_of(family), family, CLASSES[family][0], source(False, strength)) for strength in (0.4, 0.8)
    )
    original = source(False, 1).images[[0, 1, 0]].astype(float)
    assert few.latents.shape[1] < many.latents.shape[1]
    assert not np.array_equal(few.images, many.images) and original.shape == few.images.shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_a_part_of_an_image_is_made_anew(folder_of, family, strength):
    assert_equal(folder_of(family), family, CLASSES[family][1], source(True, strength))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_for_inpainting(folder_of, family):
    assert_equal(folder_of(family, True), family, CLASSES[family][1], source(True, 1.0))


def test_the_encoder_is_open_before_the_denoiser(folder_of):
    """Where one part is open at a time, each is opened once for all images of both batches."""
    checkpoint, opened_parts = opened(folder_of("sd15"), "sd15"), []
    engines = load_model(checkpoint).torch_engines()

    def open_part(part: str):
        opened_parts.append(part)
        engine = engines[part]
        engine.close = lambda: None
        return engine

    variant = Variant(Pool(open_part, most=1), {part: part for part in engines})
    pipeline_of(checkpoint, variant)(PROMPTS, sampling_of(source(True, 0.6)))
    assert opened_parts == ["text_encoder", VAE_ENCODER, "unet", "vae"]


def test_each_call_encodes_its_images_again(folder_of):
    """Else the time of an image would lack it."""
    checkpoint = opened(folder_of("sd15"), "sd15")
    engines = load_model(checkpoint).torch_engines()
    calls = []

    class Counted:
        def __getattr__(self, name):
            return getattr(engines[VAE_ENCODER], name)

        def __call__(self, **inputs):
            calls.append(inputs)
            return engines[VAE_ENCODER](**inputs)

    pipeline = pipeline_of(checkpoint, {**engines, VAE_ENCODER: Counted()})
    for _ in range(2):
        pipeline(PROMPTS[:1], sampling_of(source(False, 0.4)))
    assert len(calls) == 2


def test_what_decides_images_is_described():
    plain, image, mask = (sampling_of(given).described() for given in (None, source(False, 0.6), source(True, 0.6)))
    assert "source" not in plain and plain["steps"] == STEPS
    assert image["steps"] == 3 and image["source"] != mask["source"]
    assert image["source"] | {"strength": 0.4} == sampling_of(source(False, 0.4)).described()["source"]
