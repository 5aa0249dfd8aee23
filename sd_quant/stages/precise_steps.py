"""The choice of precise steps (denoising steps with unquantized layer inputs) by ``infer.precise_steps``.

Precise steps have to beat the alternatives of equal time: the recipe with its most sensitive layers in high precision
in all steps, and full precision in fewer steps.
"""

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from sd_quant.calibration.call_tables import Row
from sd_quant.config import Infer, QuantizeJob, prompts_of
from sd_quant.config.precise_steps import KNOB, with_ends
from sd_quant.errors import ConfigError
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.precision import best_steps, predicted_gain, products_of_steps, schedule_with
from sd_quant.inference.reuse import CHOOSING, Variant, errors_in_db, final_latents
from sd_quant.inference.samplers import COMPUTED, FULL, WEIGHTS_ALONE
from sd_quant.metrics.intervals import mean_interval
from sd_quant.models.checkpoint import Checkpoint, denoiser_of
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.record import PreciseChosen
from sd_quant.simulation.sensitivity import Switched
from sd_quant.source import source_digest
from sd_quant.stages.assign import measure_sensitivity
from sd_quant.stages.generate import calibration_sampling, recipe_sampling
from sd_quant.stages.latency import costs_of
from sd_quant.stages.shared import CallsOfAnImage
from sd_quant.stages.variants import FULL_PRECISION, QUANTIZED, Variants

LOG = logging.getLogger(__name__)
SCHEDULES = "schedules"  # kind of these cache entries
KEPT, FEWER = "keeping the most sensitive layers", "full precision in fewer steps"  # names of the controls
Latents = Callable[[Sequence[int]], Tensor]  # numbers of N prompts -> their final latents [N, ...]
# extra time, as a share of the recipe's -> an alternative of that time; None if full precision takes no more
Control = Callable[[float], Latents | None]


def choosing_sampling(job: QuantizeJob, rows: Sequence[Row]) -> Sampling:
    """Return the recipe's sampling settings for ``rows``, the prompts by which a schedule is chosen."""
    infer, own = job.infer, calibration_sampling(job.model, job.infer, job.quantize, rows)
    return replace(
        recipe_sampling(infer), seed=own.seed, batch_size=own.batch_size, latents=None, sizes=None, source=own.source,
        negative_prompts=own.negative_prompts, arguments=own.arguments,
    )  # fmt: skip


def with_precise_steps(variants: Variants, job: QuantizeJob, calls: Statistics) -> tuple[Infer, PreciseChosen | None]:
    """Choose the steps with unquantized inputs by ``infer.precise_steps``; return ``infer`` with them, and the choice.

    ``calls``: the denoiser inputs kept by calibration. Raises ConfigError for a target that no number of steps reaches.
    """
    infer, wanted = job.infer, job.infer.precise
    if wanted is None or not infer.chooses_precise:
        return infer, None
    checkpoint, shared = variants.loaded.checkpoint, variants.shared
    if variants.simulated and wanted.by_time:
        raise ConfigError(f"{KNOB} is {infer.precise_steps}, and nothing is timed: {variants.simulated}; give a number")
    rows = job.choosing_rows(2 * CHOOSING)
    prompts, sampling = prompts_of(rows), choosing_sampling(job, rows)
    steps, half = sampling.steps_taken, len(prompts) // 2
    unquantized, recipe = (variants.engines[name] for name in (FULL_PRECISION, QUANTIZED))
    origin = shared.origin(checkpoint, prompts, infer, {"engine": infer.engine}, sampling) | {
        "precise": source_digest("inference.precision"), "simulated": variants.simulated is not None,
        "assignments": variants.digests()
    }  # fmt: skip
    found = shared.found(
        SCHEDULES, origin, lambda: products_of_steps(checkpoint, unquantized, recipe, prompts[:half], sampling)
    )
    costs: dict[str, float] = {}
    if variants.simulated is None:
        timed = CallsOfAnImage(steps, precise=dict.fromkeys((WEIGHTS_ALONE, FULL), 1))
        costs = shared.found(SCHEDULES, origin | {"costs": ""}, lambda: costs_of(variants, infer, timed))
    step_time = (costs[WEIGHTS_ALONE] - 1) / steps if costs else None
    among = wanted_schedules(infer, torch.tensor(found, dtype=torch.float64), step_time)
    to_beat = controls_of(variants, prompts, sampling, costs[FULL], calls) if wanted.is_auto else {}
    chosen = shared.found(
        SCHEDULES,
        origin | {"chosen among": among, "step_time": step_time, "controls": list(to_beat)},
        lambda: choose_steps(checkpoint, unquantized, recipe, prompts, sampling, among, step_time, to_beat),
    )
    but = f", but {chosen['reason']}" if chosen["reason"] else ""
    LOG.info(
        "precise steps %s: the final latents' error on %d other prompts is %.1f dB lower%s",
        chosen["tried"], chosen["prompts"], chosen["gain_db"][0], but,
    )  # fmt: skip
    return replace(infer, schedule=chosen["schedule"], precise_steps=None), chosen


def wanted_schedules(infer: Infer, products: Tensor, step_time: float | None) -> list[str]:
    """Return schedules to try; ``products``: by ``products_of_steps``. Raises ConfigError if no schedule fits."""
    wanted, steps = infer.precise, len(products) - 1
    assert wanted is not None
    count = wanted.count
    if wanted.gain_db is not None:
        gains = {number: predicted_gain(products, best_steps(products, number)) for number in range(1, steps + 1)}
        count = next((number for number, gain in gains.items() if gain >= wanted.gain_db), None)
        expected = f"at most the {max(gains.values()):.2g} dB that unquantized inputs gain in all steps"
        if count is None:
            raise ConfigError(f"{KNOB} is {infer.precise_steps}, expected {expected}; infer.schedule has f beyond that")
    if wanted.percent is not None and step_time is not None:
        count = steps if step_time <= 0 else min(steps, int(wanted.percent / 100 / step_time))
        if count == 0:
            raise ConfigError(
                f"{KNOB} is {infer.precise_steps}, expected at least the {step_time:.2g} of an image's denoising that "
                "one step adds"
            )
    if count is not None:
        ends = with_ends(-(-count // 2), count // 2, steps)
        return list(dict.fromkeys((schedule_with(best_steps(products, count), steps), ends)))
    counts = sorted({2**power for power in range(steps.bit_length())} | {steps})
    return [schedule_with(best_steps(products, number), steps) for number in counts]


def choose_steps(
    checkpoint: Checkpoint,
    unquantized: Variant,
    recipe: Variant,
    prompts: Sequence[str],
    sampling: Sampling,
    found: Sequence[str],
    step_time: float | None,
    controls: Mapping[str, Control] = {},
) -> PreciseChosen:
    """Choose from ``found`` the schedule with the largest gain over the recipe, and over any ``controls``.

    The first half of the prompts chooses, the second half checks. ``step_time``: time added by one precise step, as a
    share of the recipe's denoising; None if nothing is timed. The schedule is used only if its gain exceeds that of
    every control of equal time, by confidence intervals that hold jointly at 95 %.
    """

    def by(schedule: str | None) -> Latents:
        timed = replace(sampling, schedule=schedule)
        return lambda numbers: final_latents(checkpoint, recipe, prompts, numbers, timed)

    def time_of(schedule: str) -> float:
        return (step_time or 0.0) * schedule.count(WEIGHTS_ALONE)

    def gain(latents: Latents | None, numbers: Sequence[int]) -> Tensor:
        """Return the gain in dB over the recipe alone, by prompt; ``latents=None``: full precision."""
        made = reference[numbers] if latents is None else latents(numbers)
        return plain[numbers] - errors_in_db(reference[numbers], made)

    def margin(schedule: str) -> float:
        """Return the gain minus the best control's gain, on the first half of the prompts."""
        others = [gain(control(time_of(schedule)), choosing).mean().item() for control in controls.values()]
        return candidates[schedule] - max(others, default=0.0)

    everyone, half = range(len(prompts)), len(prompts) // 2
    choosing, checking = everyone[:half], everyone[half:]
    reference = final_latents(checkpoint, unquantized, prompts, everyone, replace(sampling, schedule=None))
    plain = errors_in_db(reference, by(None)(everyone))
    candidates = {schedule: gain(by(schedule), choosing).mean().item() for schedule in found}
    tried = max(found, key=margin)
    own = gain(by(tried), checking)
    beside = {name: gain(control(time_of(tried)), checking) for name, control in controls.items()}
    confidence = 1 - 0.05 / max(1, len(beside))
    beyond = {name: mean_interval((own - other).tolist(), confidence) for name, other in beside.items()}
    unpaid = [name for name, interval in beyond.items() if not interval.low > 0]
    return PreciseChosen(
        schedule=COMPUTED * sampling.steps_taken if unpaid else tried,
        tried=tried,
        candidates=candidates,
        gain_db=[(mean := mean_interval(own.tolist())).value, *mean.ends],
        beyond_db={name: [interval.value, *interval.ends] for name, interval in beyond.items()},
        time=None if step_time is None else time_of(tried),
        prompts=len(checking),
        reason=f"that {unpaid[0]} gains less in the same time is not shown" if unpaid else None,
    )


def controls_of(
    variants: Variants, prompts: Sequence[str], sampling: Sampling, full_cost: float, calls: Statistics
) -> Mapping[str, Control]:
    """Return the alternatives of equal time, by name. ``full_cost``: time of a full-precision call over a recipe call.

    Keeping layers unquantized is simulated, only if memory has room; its time is estimated from multiplications.
    """
    checkpoint, denoiser, steps = variants.loaded.checkpoint, variants.loaded.denoiser, sampling.steps_taken
    unquantized, plain = variants.engines[FULL_PRECISION], replace(sampling, schedule=None)

    def fewer(share: float) -> Latents | None:
        taken = math.floor(steps * (1 + share) / full_cost)
        fewer_steps = replace(plain, steps=max(1, taken * plain.steps // steps))
        if taken >= steps:
            return None
        return lambda numbers: final_latents(checkpoint, unquantized, prompts, numbers, fewer_steps)

    @cache
    def ranked() -> dict[str, int]:
        """Return the multiplications of each quantized layer, the most sensitive layer first."""
        scale, shared = variants.loaded.guidance_scale, variants.shared
        found = measure_sensitivity(checkpoint, dict(variants.assignment), calls, 0, scale, shared).network_error
        simulated = variants.simulation(denoiser)
        one_call = {name: sample.values[0] for name, sample in calls.calls.items()}
        return multiplications(denoiser_of(checkpoint, simulated.module), found, lambda: simulated(**one_call))

    def keeping(share: float) -> Latents | None:
        if full_cost <= 1 + share:
            return None
        simulated, layers = variants.simulation(denoiser), ranked()
        before = dict(zip(layers, accumulate(layers.values()), strict=True))  # summed up to and including each layer
        room = share / (full_cost - 1) * sum(layers.values())
        quantized = [name for name in layers if before[name] > room]
        engines = ChainMap({denoiser: simulated}, unquantized)  # type: ignore[arg-type]

        def latents(numbers: Sequence[int]) -> Tensor:
            def run() -> Tensor:
                return final_latents(checkpoint, engines, prompts, numbers, plain)

            return Switched(denoiser_of(checkpoint, simulated.module), run, list(layers)).output(quantized)

        return latents

    return {FEWER: fewer, KEPT: keeping} if variants.together else {FEWER: fewer}


def multiplications(network: nn.Module, layers: Iterable[str], call: Callable[[], object]) -> dict[str, int]:
    """Count the multiplications of each of the ``layers`` in one ``call`` of the network."""
    counts = dict.fromkeys(layers, 0)

    def count(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        counts[name] += output.numel() * module.get_parameter("weight")[0].numel()

    hooks = [network.get_submodule(name).register_forward_hook(partial(count, name)) for name in counts]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return counts
