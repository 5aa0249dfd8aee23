"""Levers, means to save time other than quantization: calls whose outputs are reused, and precise steps.

A recipe's images are compared with images of each lever
alone (quantization, saved calls), and with a control: full precision with the fewest steps that take at least as long.
A recipe that saves calls has to beat the control. Images that do not depend on the recipe are made once for a sweep.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from sd_quant.config import Infer, QuantizeJob, prompts_of
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import ByBatch, Sampling
from sd_quant.inference.reuse import CHOOSING, candidates, changed_by, choose_schedule, products_of, replacements
from sd_quant.inference.schedules import FIRST_ORDER, why_not_reused
from sd_quant.metrics.fidelity import image_scores
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.report.record import IMAGE, Control, Levers
from sd_quant.source import source_digest
from sd_quant.stages.generate import generate, recipe_sampling, sampling_of
from sd_quant.stages.precise_steps import SCHEDULES, choosing_sampling, with_precise_steps
from sd_quant.stages.shared import VariantOutputs
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants

LOG = logging.getLogger(__name__)


def check_levers(checkpoint: Checkpoint, infer: Infer) -> None:
    """Raise ConfigError for a lever that the checkpoint's pipeline or sampler does not support."""
    if infer.saves_calls and (reason := why_not_reused(pipeline_of(checkpoint, {}).own_sampler)):
        knob = "schedule" if infer.reuse is None else "reuse"
        raise ConfigError(
            f"infer.{knob} is {getattr(infer, knob)}, but {reason}; leave it out, or give the checkpoint a "
            f"sampler under which it is ({', '.join(FIRST_ORDER)}) in its scheduler/scheduler_config.json"
        )


def scheduled(variants: Variants, job: QuantizeJob) -> tuple[Infer, Levers]:
    """Choose the schedule that the job's knobs ask for; return ``infer`` with it, and how it was chosen.

    Errors by reuse in single steps, the same for all recipes, are cached.
    """
    infer, precise = with_precise_steps(variants, job)
    if infer.reuse is None:
        return infer, Levers(chosen=None, precise=precise)
    checkpoint, shared = variants.loaded.checkpoint, variants.shared
    rows = job.calibration_rows()[: 2 * CHOOSING]
    prompts, sampling = prompts_of(rows), choosing_sampling(job, rows)
    source = {"source": source_digest("inference.reuse")}
    origin = shared.origin(checkpoint, prompts, infer, {"engine": infer.engine}, sampling) | source
    half, (unquantized, quantized) = len(prompts) // 2, (variants.engines[name] for name in (FULL_PRECISION, QUANTIZED))
    known = replacements(sampling.steps_taken)
    products = shared.found(
        SCHEDULES, origin, lambda: products_of(changed_by(checkpoint, unquantized, prompts[:half], sampling, known)[1])
    )
    found = candidates(products, sampling.steps_taken, infer.saved_steps)
    chosen = shared.found(
        SCHEDULES,
        origin | {"schedules": found, "assignments": variants.digests()},
        lambda: choose_schedule(checkpoint, unquantized, quantized, prompts, sampling, found, half),
    )
    LOG.info(
        "%d of %d calls are saved: %s; the final latents' error on %d other prompts is %.2g %% (evenly spread %.2g %%, "
        "%d steps instead %.2g %%)", infer.saved_steps, infer.recipe_steps, chosen["schedule"], chosen["prompts"],
        100 * chosen["error"], 100 * chosen["even_error"], infer.recipe_steps - infer.saved_steps,
        100 * chosen["fewer_error"],
    )  # fmt: skip
    return replace(infer, schedule=chosen["schedule"], reuse=None), Levers(chosen=chosen, precise=None)


def compared(
    variants: Variants, comparison: VariantOutputs, infer: Infer, latency: Mapping, chosen: Levers
) -> Levers | None:
    """Return the record's ``levers``: settings of the recipe's images, and scores of images of each lever alone.

    Returns None without levers. ``infer`` has the schedule, ``chosen`` how it was chosen; ``latency``: of the record.
    """
    calls = comparison.of_an_image
    if not infer.pulls_levers or calls is None:
        return None
    checkpoint = variants.loaded.checkpoint
    reference, recipe = (comparison.images[name].images for name in (FRAMEWORK, QUANTIZED))

    def images_of(variant: str, sampling: Sampling, what: str) -> Images:
        """Make images, or take them from the cache if another recipe or schedule has made them."""

        def make(by_batch: ByBatch) -> VariantOutputs:
            pipeline = pipeline_of(checkpoint, variants.engines[variant])
            return VariantOutputs({variant: generate(pipeline, infer.prompt_list(), sampling, what, by_batch)})

        key = {"engine": infer.engine} | ({"assignments": variants.digests()} if variant == QUANTIZED else {})
        return variants.shared.provide(checkpoint, infer, make, key, sampling).images[variant].images

    bits = images_of(QUANTIZED, sampling_of(infer), "of bits alone")
    twin = images_of(FULL_PRECISION, recipe_sampling(infer), "full precision by the recipe's calls")
    image = latency[infer.engine][IMAGE][str(infer.batch_size)]
    share = image[QUANTIZED].get("calls_share") or calls.share(
        dict.fromkeys(calls.precise, 1.0), sampling_of(infer).steps_taken
    )
    control: Control | None = None
    if (fewer := steps_in_time(image, share, infer.steps)) < infer.steps:
        images = images_of(FULL_PRECISION, replace(sampling_of(infer), steps=fewer), f"full precision in {fewer} steps")
        control = Control(steps=fewer, fidelity=image_scores(reference, images))
    return chosen | Levers(  # type: ignore[return-value]
        steps=infer.steps,
        schedule=infer.given_schedule,
        precise_calls=dict(calls.precise),
        calls=calls.number,
        share=share,
        twin=image_scores(twin, recipe),
        calls_alone=image_scores(reference, twin),
        bits_alone=image_scores(reference, bits),
        control=control,
        reason=None if control else "the recipe saves no step's time of full precision",
    )


def steps_in_time(image: Mapping, share: float, steps: int) -> int:
    """Return the fewest full-precision steps that take at least the recipe's time: by ``image``, else by ``share``."""
    speedup, rest = image.get("speedup"), image[FULL_PRECISION].get("rest")
    if not isinstance(speedup, float) or rest is None:
        return max(1, math.ceil(share * steps))
    return max(1, math.ceil(steps * ((1 + rest) / speedup - rest)))
