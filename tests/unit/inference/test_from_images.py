"""Images from images are those of diffusers' own pipelines for them, from the same folder, bit for bit."""

from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.engines.pool import Pool, Variant
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.inference.source_images import SourceImages
from sd_quant.models import VAE_ENCODER
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.stages.checks import check_mask

pytestmark = [pytest.mark.commit, pytest.mark.slow]

WIDTH, HEIGHT, STEPS = 128, 64, 4
PROMPTS = ["a red cat", "a house at the end of a long road", "a lamp"]
CLASSES = {  # of diffusers, which change an image and a part of one
    **dict.fromkeys(
        ("sd15", "sd21"), (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline)
    ),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
}


def source(masked: bool, strength: float) -> SourceImages:
    """Two images, so that the third prompt begins with the first again, and their masks."""
    random = np.random.default_rng(0)
    smooth = [np.kron(random.integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3)), np.ones((8, 8, 1))) for _ in range(2)]
    masks = np.zeros((2, HEIGHT, WIDTH), np.uint8)
    masks[0, :32], masks[1, :, 40:100] = 255, 200
    return SourceImages(np.stack(smooth).astype(np.uint8), masks if masked else None, strength)


def opened(folder: Path, family: str) -> Checkpoint:
    return open_checkpoint(folder, family, encodes=True)


def sampling_of(given: SourceImages | None, batch_size: int = 1) -> Sampling:
    return Sampling(STEPS, 3.0, HEIGHT, WIDTH, batch_size, seed=5, source=given)


def ours(checkpoint: Checkpoint, sampling: Sampling) -> Generated:
    return pipeline_of(checkpoint, load_model(checkpoint).torch_engines())(PROMPTS, sampling)


def theirs(folder: Path, kind: type, given: SourceImages) -> tuple[torch.Tensor, np.ndarray]:
    """The latents after the last step and the images, a prompt at a time, each from its own seed.

    Images are given in the order of memory that engines take: another one is summed up in another order.
    """
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    latents, images = [], []

    def remember(pipe, step: int, timestep, values: dict) -> dict:
        latents[-1] = values["latents"]
        return values

    for number, prompt in enumerate(PROMPTS):
        masks = {} if given.masks is None else {
            "mask_image": Image.fromarray(given.masks[number % 2]), "height": HEIGHT, "width": WIDTH,
        }  # fmt: skip
        image = pipe.image_processor.preprocess(Image.fromarray(given.images[number % 2])).contiguous()
        latents.append(None)
        made = pipe(
            prompt, image=image, strength=given.strength, num_inference_steps=STEPS, guidance_scale=3.0,
            output_type="np", generator=[torch.Generator().manual_seed(5 + number)], callback_on_step_end=remember,
            **masks,
        )  # fmt: skip
        images.append(made[0])
    return torch.cat(latents), (np.concatenate(images) * 255).round()


def assert_equal(folder: Path, family: str, kind: type, given: SourceImages) -> Generated:
    generated = ours(opened(folder, family), sampling_of(given))
    latents, images = theirs(folder, kind, given)
    assert generated.latents.shape[1] >= int(STEPS * given.strength)
    # bit for bit with AVX-512; with AVX2 alone sums are ordered by where their numbers lie in memory: 1e-6 of the norm
    assert (generated.latents[:, -1] - latents).norm() <= 1e-5 * latents.norm()
    assert np.abs(generated.images.astype(int) - images).max() <= 1
    return generated


@pytest.mark.parametrize(("family", "strength"), [("sd15", 1.0), ("sd21", 0.6), ("sdxl", 0.6)])
def test_an_image_is_changed_and_a_part_of_one_made_anew(folder_of, family, strength):
    assert_equal(folder_of(family), family, CLASSES[family][0], source(False, 0.5))
    assert_equal(folder_of(family), family, CLASSES[family][1], source(True, strength))


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_checkpoint_for_inpainting(folder_of, family):
    """Also in batches of two, whose sums are of another order."""
    given = source(True, 1.0)
    single = assert_equal(folder_of(family, True), family, CLASSES[family][1], given)
    double = ours(opened(folder_of(family, True), family), sampling_of(given, batch_size=2))
    assert torch.allclose(double.latents, single.latents, rtol=0, atol=1e-3 * single.latents.abs().max())
    check_mask(opened(folder_of(family), family), "infer.", None)
    check_mask(opened(folder_of(family, True), family), "infer.", "mask.png")
    with pytest.raises(ConfigError, match=r"^infer.image and infer.mask are not given, .*: it reads 9 channels, 4 of"):
        check_mask(opened(folder_of(family, True), family), "infer.", None)


def test_the_encoder_is_open_before_the_denoiser_and_each_call_encodes_its_images_again(folder_of):
    """Where one part is open at a time, each is opened once for all images of both batches; an image's time has all."""
    checkpoint, opened_parts, calls = opened(folder_of("sd15"), "sd15"), [], []
    engines = load_model(checkpoint).torch_engines()

    def open_part(part: str):
        opened_parts.append(part)
        engine = engines[part]
        engine.close = lambda: None
        return engine

    variant = Variant(Pool(open_part, most=1), {part: part for part in engines})
    pipeline_of(checkpoint, variant)(PROMPTS, sampling_of(source(True, 0.6), batch_size=2))
    assert opened_parts == ["text_encoder", VAE_ENCODER, "unet", "vae"]
    encode = engines[VAE_ENCODER]
    engines[VAE_ENCODER] = lambda **inputs: calls.append(inputs) or encode(**inputs)
    pipeline = pipeline_of(checkpoint, engines)
    for _ in range(2):
        pipeline(PROMPTS[:1], sampling_of(source(False, 0.5)))
    assert len(calls) == 2


def test_what_decides_images_is_described():
    plain, image, mask = (sampling_of(given).described() for given in (None, source(False, 0.6), source(True, 0.6)))
    assert "source" not in plain and plain["steps"] == STEPS
    assert image["steps"] == 2 and image["source"] != mask["source"]
    assert image["source"] | {"strength": 0.4} == sampling_of(source(False, 0.4)).described()["source"]
