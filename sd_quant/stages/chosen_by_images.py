"""The image error that decides formats: of simulated images against full precision, on a few calibration prompts.

The error of a single network call does not predict the error of images: on the shipped checkpoint, presets with the
same error in a call differed by up to six times in images.
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
    """Return a function ``(assignments, progress label) -> mean squared error of images``, where white is 1.

    Also return the inputs of each part's first CALLS calls in full precision. Images start from noise.
    """
    model, rows = loaded.model, loaded.model.calibration_rows()[:PROMPTS]
    infer = replace(
        loaded.infer, prompts=prompts_of(rows), table=None, num_samples=1, num_prompts=None, prompts_seed=0,
        seed=loaded.recipe.seed, negative_prompt=None, latents=None, image=None, mask=None,
        control=[], strength=None,
    )  # fmt: skip
    arguments = arguments_of("model.calibration_control", model.calibration_control, rows)
    sampling = replace(sampling_of(infer), arguments=arguments)
    full, calls = images_of(loaded, infer, sampling, {}, "full precision")
    return lambda given, what: squared_error(full, images_of(loaded, infer, sampling, given, what)[0]), calls


def images_of(
    loaded: Loaded, infer: Infer, sampling: Sampling, assignments: Assignments, what: str
) -> tuple[Images, dict[str, list[dict[str, Tensor]]]]:
    """Make images, the parts in ``assignments`` simulated; return them and the inputs of each part's first calls."""
    variant = torch_variant(loaded, infer, assignments)
    watched = WatchedVariant(variant, dict.fromkeys(loaded.parts, range(CALLS)))
    try:
        pipeline = pipeline_of(loaded.checkpoint, watched)
        images = generate(pipeline, infer.prompt_list(), sampling, what).images
    finally:
        variant.pool.close()
    return images, {part: list(calls.values()) for part, calls in watched.seen.items()}


def squared_error(full: Images, images: Images) -> float:
    """Return the mean squared error of uint8 images, scaled so that white is 1."""
    errors = [np.square((one.astype(float) - other) / 255).mean() for one, other in zip(full, images, strict=True)]
    return float(np.mean(errors))
