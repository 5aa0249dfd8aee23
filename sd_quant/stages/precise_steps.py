"""The choice of precise steps (denoising steps with unquantized layer inputs), where their number is given.

Alternative not taken: a choice by gain or time, or of none where keeping layers in high precision gains more in that
time. Steps beat layers in nine of ten recipes, and a sweep compares both.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sd_quant.calibration.call_tables import Row
from sd_quant.config import Infer, QuantizeJob, prompts_of
from sd_quant.config.precise_steps import with_ends
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.precision import best_steps, products_of_steps, schedule_with
from sd_quant.inference.reuse import CHOOSING, Variant, errors_in_db, final_latents
from sd_quant.metrics.intervals import mean_interval
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.report.record import PreciseChosen
from sd_quant.source import source_digest
from sd_quant.stages.generate import calibration_sampling, recipe_sampling
from sd_quant.stages.variants import FULL_PRECISION, QUANTIZED, Variants

LOG = logging.getLogger(__name__)
SCHEDULES = "schedules"  # kind of these cache entries


def choosing_sampling(job: QuantizeJob, rows: Sequence[Row]) -> Sampling:
    """Return the recipe's sampling settings for ``rows``, the prompts by which a schedule is chosen."""
    infer, own = job.infer, calibration_sampling(job.model, job.infer, job.quantize, rows)
    return replace(
        recipe_sampling(infer), seed=own.seed, batch_size=own.batch_size, latents=None, sizes=None, source=own.source,
        negative_prompts=own.negative_prompts, arguments=own.arguments,
    )  # fmt: skip


def with_precise_steps(variants: Variants, job: QuantizeJob) -> tuple[Infer, PreciseChosen | None]:
    """Choose the steps with unquantized inputs by ``infer.precise_steps``; return ``infer`` with them, and how."""
    infer, wanted = job.infer, job.infer.precise
    if wanted is None or wanted.count is None:
        return infer, None
    checkpoint, shared = variants.loaded.checkpoint, variants.shared
    rows = job.choosing_rows(2 * CHOOSING)
    prompts, sampling = prompts_of(rows), choosing_sampling(job, rows)
    steps, half = sampling.steps_taken, len(prompts) // 2
    unquantized, recipe = (variants.engines[name] for name in (FULL_PRECISION, QUANTIZED))
    origin = shared.origin(checkpoint, prompts, infer, {"engine": infer.engine}, sampling) | {
        "precise": source_digest("inference.precision"), "simulated": variants.simulated is not None,
        "assignments": variants.digests()
    }  # fmt: skip
    products = shared.found(
        SCHEDULES, origin, lambda: products_of_steps(checkpoint, unquantized, recipe, prompts[:half], sampling)
    )
    best = best_steps(torch.tensor(products, dtype=torch.float64), wanted.count)
    ends = with_ends(-(-wanted.count // 2), wanted.count // 2, steps)
    among = list(dict.fromkeys((schedule_with(best, steps), ends)))
    chosen = shared.found(
        SCHEDULES,
        origin | {"chosen among": among},
        lambda: choose_steps(checkpoint, unquantized, recipe, prompts, sampling, among),
    )
    LOG.info(
        "precise steps %s: the final latents' error on %d other prompts is %.1f dB lower",
        chosen["schedule"], chosen["prompts"], chosen["gain_db"][0],
    )  # fmt: skip
    return replace(infer, schedule=chosen["schedule"], precise_steps=None), chosen


def choose_steps(
    checkpoint: Checkpoint,
    unquantized: Variant,
    recipe: Variant,
    prompts: Sequence[str],
    sampling: Sampling,
    found: Sequence[str],
) -> PreciseChosen:
    """Choose from ``found`` the schedule with the largest gain over the recipe.

    The first half of the prompts chooses; the gain of the chosen schedule is measured on the second half.
    """

    def latents(schedule: str | None, numbers: Sequence[int]) -> Tensor:
        return final_latents(checkpoint, recipe, prompts, numbers, replace(sampling, schedule=schedule))

    def gain(schedule: str, numbers: Sequence[int]) -> Tensor:
        """Return the gain in dB over the recipe alone, by prompt."""
        return plain[numbers] - errors_in_db(reference[numbers], latents(schedule, numbers))

    everyone, half = range(len(prompts)), len(prompts) // 2
    choosing, checking = everyone[:half], everyone[half:]
    reference = final_latents(checkpoint, unquantized, prompts, everyone, replace(sampling, schedule=None))
    plain = errors_in_db(reference, latents(None, everyone))
    candidates = {schedule: gain(schedule, choosing).mean().item() for schedule in found}
    chosen = max(found, key=candidates.__getitem__)
    mean = mean_interval(gain(chosen, checking).tolist())
    return PreciseChosen(
        schedule=chosen, candidates=candidates, gain_db=[mean.value, *mean.ends], prompts=len(checking)
    )
