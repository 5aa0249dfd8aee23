"""Images from prompts: sampling settings from the knobs, and one call of the pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sd_quant.calibration.call_tables import Row
from sd_quant.calibration.prompts import KEPT, write_prompts
from sd_quant.config import Infer, Model, Quantize, sizes_of
from sd_quant.files.image_files import image_files, mask_files
from sd_quant.files.images import read_whole
from sd_quant.inference.latents import read_latents
from sd_quant.inference.pipeline import ByBatch, Generated, Pipeline, Sampling, in_turn
from sd_quant.inference.source_images import SourceImages, read_source
from sd_quant.knobs import check
from sd_quant.models import LATENT_FACTOR
from sd_quant.places import input_path
from sd_quant.progress import progress

PIXELS = 1024**2  # upper bound for an image argument of a call: what editing pipelines read


def sampling_of(infer: Infer) -> Sampling:
    """Return the sampling settings of ``infer``. Raises SdQuantError for noise or images that cannot be used."""
    return Sampling(
        infer.steps, infer.scale, infer.height, infer.width, infer.batch_size, infer.seed,
        infer.negative_prompts(infer.num_samples), latents_of(infer), source_of(infer),
        sizes_of(infer) if infer.sizes else None, infer.vae_tile,
        arguments=arguments_of("infer.control", infer.control, infer.rows(), infer.num_samples),
    )  # fmt: skip


def recipe_sampling(infer: Infer) -> Sampling:
    """Return ``sampling_of(infer)`` with the recipe's own schedule."""
    return replace(sampling_of(infer), schedule=infer.given_schedule)


def calibration_sampling(model: Model, infer: Infer, knobs: Quantize, rows: Sequence[Row] = ()) -> Sampling:
    """Return the sampling settings of calibration. Raises SdQuantError for images that cannot be used."""
    (width, height), *others = sizes = sizes_of(model)
    return Sampling(
        knobs.n_steps, infer.scale, height, width, knobs.batch_size, knobs.seed, infer.negative_prompts(),
        source=calibration_source_of(model, infer), sizes=sizes if others else None,
        arguments=arguments_of("model.calibration_control", model.calibration_control, rows),
    )  # fmt: skip


def source_of(infer: Infer) -> SourceImages | None:
    """Read the start images, repeated for every sample of a prompt. Raises SdQuantError for an unreadable image."""
    source = images_of("infer.", infer.image, infer.mask, infer.width, infer.height, infer.strength_with(infer.mask))
    return None if source is None else source.repeated(infer.num_samples)


def calibration_source_of(model: Model, infer: Infer) -> SourceImages | None:
    """Read calibration's start images, at ``infer``'s strength. Raises SdQuantError for an unreadable image."""
    strength = infer.strength_with(model.calibration_mask)
    return images_of(
        "model.calibration_", model.calibration_image, model.calibration_mask, model.width, model.height, strength
    )


def images_of(
    knobs: str, image: str | None, mask: str | None, width: int, height: int, strength: float
) -> SourceImages | None:
    """Read start images and masks at two paths; None without images. ``knobs``: setting prefix, such as ``infer.``."""
    if image is None:
        return None
    images = image_files(f"{knobs}image", input_path(image))
    masks = None if mask is None else mask_files(f"{knobs}mask", input_path(mask), images)
    return read_source(images, masks, width, height, strength)


def arguments_of(
    knob: str, control: Sequence[str], rows: Sequence[Row], samples: int = 1
) -> list[dict[str, Any]] | None:
    """Return additional arguments of the pipeline's calls, ``samples`` times for each prompt; None if there are none.

    Arguments are the condition images in ``control`` (one path a ControlNet), or the columns of a call table's
    ``rows``. Raises ConfigError for unequal numbers of condition images, SdQuantError for unreadable images.
    """
    each = [image_files(knob, input_path(path)) for path in control]
    count = max(map(len, each), default=0)
    for path, files in zip(control, each, strict=True):
        check(len(files) in (1, count), knob, f"{path} with {len(files)} images", f"{count}, as another has, or one")
    conditions = [[files[number % len(files)] for files in each] for number in range(count)]
    calls = [{"image": of_one if len(of_one) > 1 else of_one[0]} for of_one in conditions]
    calls = calls or [row.arguments for row in rows]
    return [call for files in calls for call in [pixels_of(files)] * samples] if any(calls) else None


def pixels_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace image files in a call's arguments by their pixels. Raises SdQuantError for an unreadable image."""

    def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [read(name, each) for each in value]
        return read_whole(value, PIXELS, "L" if "mask" in name else "RGB") if isinstance(value, Path) else value

    return {name: read(name, value) for name, value in arguments.items()}


def latents_of(infer: Infer) -> Tensor | None:
    """Read the noise at ``infer.latents``, fp32 [images (or 1, with one sample a prompt), channels, height, width].

    Raises ConfigError for noise of another shape, ArtifactError if the file cannot be used.
    """
    if infer.latents is None:
        return None
    images = len(infer.prompt_list())
    numbers = {images} if infer.num_samples > 1 else {1, images}  # equal noise would make equal samples
    rows, columns = infer.height // LATENT_FACTOR, infer.width // LATENT_FACTOR
    return read_latents(input_path(infer.latents), numbers, rows, columns)


def generate(
    pipeline: Pipeline, prompts: list[str], sampling: Sampling, description: str, by_batch: ByBatch = in_turn
) -> Generated:
    """Make an image for each prompt, with a progress bar named ``description``; ``by_batch`` runs the batches."""
    batches = len(sampling.batches(range(len(prompts))))
    with progress(batches * sampling.steps_taken, f"images, {description}") as advance:
        return pipeline(prompts, sampling, on_step=lambda step: advance(), by_batch=by_batch)


def keep_prompts(infer: Infer, directory: Path) -> None:
    """Write drawn prompts to a file in ``directory``; their source is then not needed."""
    if infer.num_prompts is not None:
        write_prompts(infer.distinct_prompts(), directory / KEPT)


def image_names(prompts: list[str]) -> list[str]:
    """Return the file names (without suffix) of a run's images: consecutive numbers."""
    return [f"{index:04}" for index in range(len(prompts))]
