"""Checks of the image settings: before a checkpoint is opened, and against the opened checkpoint's structure.

``session`` calls them; ``opening`` calls ``check_request`` too.
"""

import inspect
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from sd_quant.calibration.call_tables import Row
from sd_quant.checkpoints.diffusers_pipeline import read_index
from sd_quant.checkpoints.lora import bundled_words, open_lora
from sd_quant.checkpoints.unopened import own_size
from sd_quant.config import CALIBRATION_TABLE, Infer, Model, sizes_of
from sd_quant.config.images import TABLE
from sd_quant.errors import ConfigError
from sd_quant.files.checks import listing
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.requests import check_taken
from sd_quant.knobs import check
from sd_quant.models import FAMILIES, LATENT_FACTOR, OBSERVED
from sd_quant.models.checkpoint import Checkpoint, contracts_of, denoiser_part, samples_per_image
from sd_quant.models.family import family_named
from sd_quant.places import input_path
from sd_quant.stages.generate import arguments_of, calibration_source_of, latents_of, sampling_of

LOG = logging.getLogger(__name__)
MOST_STEPS = 1000  # the limit for a sampler whose config states no number of noise levels


def check_request(model: Model, infer: Infer) -> None:
    """Check the image settings against the model's family, before a checkpoint is opened. Raises SdQuantError.

    Refused are, among others: a negative prompt for a family without unconditional text, start images for a family
    without image-to-image, prompts with words whose embeddings a LoRA brings, and unreadable noise or image files.
    """
    if family_named(model.family).FROM_IMAGES is None:
        able = ", ".join(name for name in FAMILIES if family_named(name).FROM_IMAGES)
        knobs = {"infer.image": infer.image, "model.calibration_image": model.calibration_image}
        for knob, value in knobs.items():
            check(value is None, knob, value, f"null, because only {able} begin with images here")
        check(not model.encoder, "model.encoder", True, f"false, because only {able} begin with images here")
    check_controls(model, infer)
    guides = family_named(model.family).GUIDES
    expected = f"null, because the guidance of {model.family} is an input of its network, which reads no second text"
    check(guides or infer.negative_prompt is None, "infer.negative_prompt", infer.negative_prompt, expected)
    for path, *_ in model.adapters():
        text = "\n".join([*infer.distinct_prompts(), *(infer.negative_prompts() or [])])
        words = [word for word in bundled_words(open_lora(path)[0])
                 if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)]  # fmt: skip
        expected = f"prompts without {listing(words)}, because what it adds to networks is applied, and no embedding is"
        check(not words, "model.loras", path, expected)
    check_calls(model, infer)
    sampling_of(infer)
    calibration_source_of(model, infer)
    arguments_of("model.calibration_control", model.calibration_control, [])


def check_controls(model: Model, infer: Infer) -> None:
    """Check that each ControlNet has condition images, and that other settings allow ControlNets. Raises ConfigError.

    Condition images for calibration may be missing here: a job may not calibrate.
    """
    nets, knob = len(model.controlnets), "model.controlnets"
    expected = f"{nets or 'no'} images or folders, one for each of {knob}"
    check(len(infer.control) == nets, "infer.control", infer.control, expected)
    check(len(model.calibration_control) in (0, nets), "model.calibration_control", model.calibration_control, expected)
    if nets:
        able = ", ".join(name for name in FAMILIES if family_named(name).CONTROLLED)
        expected = f"[], because only {able} have ControlNets here; a pipeline of another is for model=diffusers"
        check(family_named(model.family).CONTROLLED is not None, knob, model.controlnets, expected)
        for name, image in (("infer.image", infer.image), ("model.calibration_image", model.calibration_image)):
            check(image is None, name, image, f"null, because images with {knob} begin with noise here")
        expected = "1, because several ControlNets take the condition images of one prompt at a time"
        check(nets == 1 or infer.batch_size == 1, "infer.batch_size", infer.batch_size, expected)


def check_calls(model: Model, infer: Infer) -> None:
    """Raise ConfigError if only images or only calibration have a table of pipeline calls, or the columns differ."""
    given = {CALIBRATION_TABLE: model.calibration_table, TABLE: infer.table}
    lacking, there = sorted(given, key=lambda knob: given[knob] is not None)
    both = (given[lacking] is None) == (given[there] is None)
    check(both, lacking, "null", f"a table, because {there} is one: calibration and the images are of the same calls")
    if not (rows := infer.rows()):
        return
    check(model.family == OBSERVED, TABLE, infer.table, "null, because tables of calls are for model=diffusers alone")
    found, known = sorted(rows[0].arguments), sorted(model.calibration_rows()[0].arguments)
    expected = f"the columns {', '.join(known)} of {CALIBRATION_TABLE}, with which the pipeline is observed"
    check(found == known, TABLE, f"a table with {', '.join(found)}", expected)
    same = "negative_prompt" not in found or infer.negative_prompt is None
    expected = f"null, because {TABLE} has a column of this name"
    check(same, "infer.negative_prompt", infer.negative_prompt, expected)


def check_table(path: Path, arguments: Collection[str], example: Row) -> None:
    """Check a call table's columns against the pipeline in the folder ``path``. Raises ConfigError for a wrong column.

    ``arguments``: names of the arguments that all calls share; ``example``: a row of the table.
    """
    kind, _ = read_index(path)
    check_taken(kind, CALIBRATION_TABLE, example.arguments)
    both = sorted(example.arguments.keys() & set(arguments))
    check(not both, "model.arguments", f"with {both[:1]}", f"others than the columns of {CALIBRATION_TABLE}")
    takes, has = "prompt" in inspect.signature(kind.__call__).parameters, example.prompt is not None
    expected = f"one, because {kind.__name__} takes a prompt" if takes else f"none, because {kind.__name__} takes none"
    check(has == takes, CALIBRATION_TABLE, f"{'with' if has else 'without'} a column prompt", expected)


def check_latents(checkpoint: Checkpoint, infer: Infer) -> None:
    """Check the noise in ``infer.latents``. Raises ConfigError for wrong channels, or if the pipeline draws its own."""
    latents = latents_of(infer)
    if latents is None:
        return
    if checkpoint.family.OWN_NOISE:
        because = "because the pipeline draws its own noise, from infer.seed"
        check(False, "infer.latents", infer.latents, f"null with model=diffusers, {because}")
    channels = contracts_of(checkpoint)["vae"].inputs["z"][1]
    if latents.shape[1] != channels:
        raise ConfigError(
            f"infer.latents: {infer.latents} holds {latents.shape[1]} channels, and the latents of this checkpoint "
            f"have {channels}; make them for it"
        )


def check_tile(checkpoint: Checkpoint, infer: Infer) -> None:
    """Raise ConfigError for tiled decoding (``infer.vae_tile``) if the pipeline itself decodes (model=diffusers)."""
    expected = "null with model=diffusers, because the pipeline decodes its images by itself"
    check(infer.vae_tile is None or not checkpoint.family.OWN_NOISE, "infer.vae_tile", infer.vae_tile, expected)


def check_mask(checkpoint: Checkpoint, knobs: str, mask: str | None) -> None:
    """Raise ConfigError for an inpainting denoiser without a mask; ``knobs``: setting prefix, such as ``infer.``."""
    if checkpoint.family.FROM_IMAGES is None:
        return
    contracts = contracts_of(checkpoint)
    channels, read = contracts["vae"].inputs["z"][1], next(iter(contracts[checkpoint.family.DENOISER].inputs.values()))
    if read[1] == 2 * channels + 1 and mask is None:
        raise ConfigError(
            f"{knobs}image and {knobs}mask are not given, expected both, because this checkpoint's denoiser is one for "
            f"inpainting: it reads {read[1]} channels, {channels} of latents, {channels} of a masked image and its mask"
        )


def check_guidance(checkpoint: Checkpoint, infer: Infer) -> None:
    """Raise ConfigError for a guidance scale above 1 or a negative prompt that the networks cannot use."""
    distilled = checkpoint.family.GUIDES and samples_per_image(checkpoint, 2) == 1
    expected = "null, because this checkpoint was distilled to read the guidance scale and reads no second text"
    check(not distilled or infer.negative_prompt is None, "infer.negative_prompt", infer.negative_prompt, expected)
    expected = (
        "at most 1, because this checkpoint was distilled to do without guidance and takes no scale; for Flux schnell "
        "model=flux_schnell has the knobs"
    )
    reads = checkpoint.family.reads_guidance(denoiser_part(checkpoint).contract)
    check(infer.scale <= 1 or reads, "infer.scale", infer.scale, expected)


def check_steps(checkpoint: Checkpoint, knob: str, steps: int) -> None:
    """Raise ConfigError for more ``steps`` than the checkpoint's sampler has noise levels; ``knob``: their setting."""
    config = pipeline_of(checkpoint, {}).own_sampler.config
    most = config.get("num_train_timesteps", MOST_STEPS) - (config.get("steps_offset") or 0)
    check(steps <= most, knob, steps, f"at most {most}, for which this checkpoint's sampler has noise levels")


def check_batch(checkpoint: Checkpoint, knob: str, images: int) -> None:
    """Raise ConfigError if ``knob`` (``images`` a batch) is above 1 and prompt lengths or a fixed graph forbid it."""
    because, part = checkpoint.family.UNEQUAL, checkpoint.family.ONE_BATCH
    check(because is None or images == 1, knob, images, f"1, because prompts differ in length and {because}")
    executes = knob.startswith("infer.")
    expected = f"1, because the graph of {part} serves no other batch"
    check(part is None or not executes or images == 1, knob, images, expected)


def check_sizes(checkpoint: Checkpoint, section: str, knobs: Infer | Model) -> None:
    """Raise ConfigError for sizes beyond the denoiser's position embeddings, or not the one size of a fixed graph."""
    only = checkpoint.family.ONE_SIZE
    if only is not None and section == "infer":
        part, *size = only
        expected = (
            f"{size[0]} x {size[1]}, with which the pipeline was observed, because the graph of {part} serves no other"
        )
        for width, height in sizes_of(knobs):
            check([width, height] == size, sides_of(section, knobs), f"{width} x {height}", expected)
    latents = denoiser_part(checkpoint).contract.latents
    if latents is None:
        return
    most = latents * LATENT_FACTOR
    expected = f"at most {most} pixels a side, because this checkpoint knows the places of no more"
    for width, height in sizes_of(knobs):
        stated, found = sides_of(section, knobs), f"{width} x {height}"
        check(max(width, height) <= most, stated, found, expected)


def sides_of(section: str, knobs: Infer | Model) -> str:
    """Return the names of the settings of a ``section`` (such as ``infer``) that state the sizes of images."""
    return f"{section}.sizes" if knobs.sizes else f"{section}.width and {section}.height"


def warn_of_size(model: Model, sections: Mapping[str, Infer | Model]) -> None:
    """Warn of images with less than half or more than twice the pixels of the checkpoint's native size."""
    size = None if model.family == OBSERVED else own_size(input_path(model.path))  # the native size is not known
    for section, knobs in sections.items():
        for width, height in sizes_of(knobs) if size is not None else ():
            if not 0.5 <= height * width / (size[0] * size[1]) <= 2:
                LOG.warning(
                    "%s ask for %d x %d, and this checkpoint was made for %d x %d: images of another size are often "
                    "broken, and so is what is calibrated on them",
                    sides_of(section, knobs), width, height, size[1], size[0],
                )  # fmt: skip
