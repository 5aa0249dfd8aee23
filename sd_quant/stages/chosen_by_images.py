"""The images by which formats are chosen: those of a few calibration prompts, in full precision and simulated.

One call of a network does not say what its images lose: of presets on the shipped checkpoint, the same error of a call
did up to six times as much to images.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from sd_quant.config import Infer, prompts_of
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.images import Images
from sd_quant.stages.generate import arguments_of, generate, sampling_of
from sd_quant.stages.load import Loaded
from sd_quant.stages.variants import Assignments, torch_variant

ImageErrors = Callable[[Assignments, str], float]
PROMPTS, CALLS = 4, 4  # calibration prompts whose images are made; calls of a part in which its layers are measured


def image_errors(loaded: Loaded) -> tuple[ImageErrors, dict[str, list[dict[str, Tensor]]]]:
    """A function of assignments and a name that returns the mean squared error of images, where white is 1.

    And the inputs of the first calls of each part in full precision. Images are of calibration prompts, from noise.
    """
    model, rows = loaded.model, loaded.model.calibration_rows()[:PROMPTS]
    infer = replace(
        loaded.infer, prompts=prompts_of(rows), table=None, num_samples=1, num_prompts=None, prompts_seed=0,
        prompts_category=None, seed=loaded.recipe.seed, negative_prompt=None, latents=None, image=None, mask=None,
        control=[], strength=None,
    )  # fmt: skip
    arguments = arguments_of("model.calibration_control", model.calibration_control, rows)
    sampling = replace(sampling_of(infer), arguments=arguments)
    full, calls = images_of(loaded, infer, sampling, {}, "full precision")
    return lambda given, what: squared_error(full, images_of(loaded, infer, sampling, given, what)[0]), calls


def images_of(
    loaded: Loaded, infer: Infer, sampling: Sampling, assignments: Assignments, what: str
) -> tuple[Images, dict[str, list[dict[str, Tensor]]]]:
    """Images with those parts simulated that have an assignment, and the inputs of the first calls of each part."""
    variant = torch_variant(loaded, infer, assignments)
    watched = WatchedVariant(variant, dict.fromkeys(loaded.parts, range(CALLS)))
    try:
        pipeline = pipeline_of(loaded.checkpoint, watched)
        images = generate(pipeline, infer.prompt_list(), sampling, what).images
    finally:
        variant.pool.close()
    return images, {part: list(calls.values()) for part, calls in watched.seen.items()}


def squared_error(full: Images, images: Images) -> float:
    """The mean squared error of images, uint8, where white is 1."""
    errors = [np.square((one.astype(float) - other) / 255).mean() for one, other in zip(full, images, strict=True)]
    return float(np.mean(errors))
