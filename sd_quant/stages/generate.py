"""Images by the knobs of ``infer``."""

from collections.abc import Mapping

from torch import Tensor

from sd_quant.config import Infer, Model, sizes_of
from sd_quant.config.sections import Sized
from sd_quant.errors import ConfigError
from sd_quant.files.image_files import image_files, mask_files
from sd_quant.inference.latents import read_latents
from sd_quant.inference.loading import most_steps
from sd_quant.inference.pipeline import Generated, Pipeline, Sampling
from sd_quant.inference.source_images import SourceImages, read_source
from sd_quant.knobs import check
from sd_quant.models import FAMILIES, LATENT_FACTOR, family_named
from sd_quant.models.checkpoint import Checkpoint, contracts_of, denoiser_part, reads_guidance
from sd_quant.places import input_path
from sd_quant.progress import progress


def sampling_of(infer: Infer) -> Sampling:
    """How the knobs say that images are made. Raises what ``latents_of`` and ``source_of`` raise."""
    return Sampling(
        infer.steps, infer.scale, infer.height, infer.width, infer.batch_size, infer.seed,
        infer.negative_prompts(infer.num_samples), latents_of(infer), source_of(infer),
        sizes_of(infer) if infer.sizes else None,
    )  # fmt: skip


def source_of(infer: Infer) -> SourceImages | None:
    """The images to start from that the knobs name, each repeated for every sample of its prompt.

    Raises what ``read_source`` raises.
    """
    source = images_of("infer.", infer.image, infer.mask, infer.width, infer.height, infer.strength_with(infer.mask))
    return None if source is None else source.repeated(infer.num_samples)


def calibration_source_of(model: Model, infer: Infer) -> SourceImages | None:
    """The images that calibration starts from, by the same strength. Raises what ``read_source`` raises."""
    strength = infer.strength_with(model.calibration_mask)
    return images_of(
        "model.calibration_", model.calibration_image, model.calibration_mask, model.width, model.height, strength
    )


def images_of(
    knobs: str, image: str | None, mask: str | None, width: int, height: int, strength: float
) -> SourceImages | None:
    """The images and masks of two knobs, whose names ``knobs`` begins; None for null."""
    if image is None:
        return None
    images = image_files(f"{knobs}image", input_path(image))
    masks = None if mask is None else mask_files(f"{knobs}mask", input_path(mask), images)
    return read_source(images, masks, width, height, strength)


def latents_of(infer: Infer) -> Tensor | None:
    """The noise that the knobs name, fp32 [N, C, h, w]: one for each image, or without samples one for all.

    Raises ConfigError when it is of other images, ArtifactError when the file cannot be used.
    """
    if infer.latents is None:
        return None
    images = len(infer.prompt_list())
    numbers = {images} if infer.num_samples > 1 else {1, images}  # else the samples of a prompt would be one image
    rows, columns = infer.height // LATENT_FACTOR, infer.width // LATENT_FACTOR
    return read_latents(input_path(infer.latents), numbers, rows, columns)


def check_images(model: Model, infer: Infer) -> None:
    """Raises SdQuantError, before a checkpoint is opened, for what cannot be had of images.

    That is a negative prompt for a family that computes nothing without the prompt, images to start from for one whose
    pipeline has none, and what ``latents_of``, ``source_of`` and ``calibration_source_of`` refuse.
    """
    if family_named(model.family).FROM_IMAGES is None:
        able = ", ".join(name for name in FAMILIES if family_named(name).FROM_IMAGES)
        knobs = {"infer.image": infer.image, "model.calibration_image": model.calibration_image}
        for knob, value in knobs.items():
            check(value is None, knob, value, f"null, because only {able} begin with images here")
        check(not model.encoder, "model.encoder", True, f"false, because only {able} begin with images here")
    guides = family_named(model.family).GUIDES
    expected = f"null, because the guidance of {model.family} is an input of its network, which reads no second text"
    check(guides or infer.negative_prompt is None, "infer.negative_prompt", infer.negative_prompt, expected)
    latents_of(infer)
    source_of(infer)
    calibration_source_of(model, infer)


def check_channels(checkpoint: Checkpoint, infer: Infer) -> None:
    """Raises ConfigError when the noise that the knobs name is of another autoencoder than the checkpoint's.

    And when a denoiser for inpainting is given no mask.
    """
    check_mask(checkpoint, "infer.", infer.mask)
    latents, channels = latents_of(infer), contracts_of(checkpoint)["vae"].inputs["z"][1]
    if latents is not None and latents.shape[1] != channels:
        raise ConfigError(
            f"infer.latents: {infer.latents} holds {latents.shape[1]} channels, and the latents of this checkpoint "
            f"have {channels}; make them for it"
        )


def check_mask(checkpoint: Checkpoint, knobs: str, mask: str | None) -> None:
    """Raises ConfigError where the denoiser reads an image and a mask beside the latents, and the mask is null.

    ``knobs`` begins the names of the knobs for both.
    """
    contracts = contracts_of(checkpoint)
    channels, read = contracts["vae"].inputs["z"][1], next(iter(contracts[checkpoint.family.DENOISER].inputs.values()))
    if read[1] == 2 * channels + 1 and mask is None:
        raise ConfigError(
            f"{knobs}image and {knobs}mask are not given, expected both, because this checkpoint's denoiser is one for "
            f"inpainting: it reads {read[1]} channels, {channels} of latents, {channels} of a masked image and its mask"
        )


def check_guidance(checkpoint: Checkpoint, infer: Infer) -> None:
    """Raises ConfigError for a guidance scale of which nothing in the checkpoint is told."""
    expected = (
        "at most 1, because this checkpoint was distilled to do without guidance and takes no scale; for Flux schnell "
        "model=flux_schnell has the knobs"
    )
    check(infer.scale <= 1 or reads_guidance(checkpoint), "infer.scale", infer.scale, expected)


def check_steps(checkpoint: Checkpoint, steps: Mapping[str, int]) -> None:
    """Raises ConfigError for a knob in ``steps`` with more denoising steps than the checkpoint's sampler can make."""
    most = most_steps(checkpoint)
    for knob, number in steps.items():
        check(number <= most, knob, number, f"at most {most}, for which this checkpoint's sampler has noise levels")


def check_sizes(checkpoint: Checkpoint, sections: Mapping[str, Sized]) -> None:
    """Raises ConfigError when a section asks for images with more latents along a side than the denoiser takes."""
    latents = denoiser_part(checkpoint).contract.latents
    for section, knobs in sections.items():
        for width, height in sizes_of(knobs) if latents is not None else ():
            stated = f"{section}.sizes" if knobs.sizes else f"{section}.width and {section}.height"
            most, found = latents * LATENT_FACTOR, f"{width} x {height}"
            expected = f"at most {most} pixels a side, because this checkpoint knows the places of no more"
            check(max(width, height) <= most, stated, found, expected)


def generate(pipeline: Pipeline, prompts: list[str], infer: Infer, description: str) -> Generated:
    """An image for each prompt, with a progress bar that shows the ``description``."""
    sampling = sampling_of(infer)
    batches = len(sampling.batches(range(len(prompts))))
    with progress(batches * sampling.steps_taken, f"images, {description}") as advance:
        return pipeline(prompts, sampling, on_step=lambda step: advance())


def image_names(prompts: list[str]) -> list[str]:
    """The file names of a run's images, without suffix: their numbers, because prompts are no file names."""
    return [f"{index:04}" for index in range(len(prompts))]
