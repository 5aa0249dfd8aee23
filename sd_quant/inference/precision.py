"""Choose the denoising steps that multiply unquantized inputs, by what each step's quantization does to the image.

With all steps precise, the inputs of one step after the other are quantized alone, and what this changes in the *final*
latents is kept as a vector. Such changes add up nearly linearly, so the error of any choice is the norm of a sum: of
the error with all steps precise, and of the changes by all that are not. The matrix of the products of these vectors
gives it without another call, and errors that cancel each other are found. The best set of a number of steps is looked
for by exchanges, beside the first and last steps that published checkpoints declare; the recipe's own engines decide.

Precise steps have to beat what else the same time buys: the recipe with its most sensitive layers in high precision
in all steps, and full precision in fewer steps. The roads not taken are a threshold on the change from step to step,
which does not see what an error becomes until the end, and a search by images, which takes hundreds for each number.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.reuse import (
    Replacement,
    Variant,
    changed_by,
    errors_in_db,
    final_latents,
    products_of,
    schedule_of,
)
from sd_quant.inference.samplers import COMPUTED, WEIGHTS_ALONE
from sd_quant.metrics.intervals import Interval, mean_interval
from sd_quant.models.checkpoint import Checkpoint

Latents = Callable[[Sequence[int]], Tensor]  # the final latents [N, ...] of the prompts with these numbers
# what takes a share of time more than the recipe's denoising; None where full precision itself takes no more
Control = Callable[[float], Latents | None]
UNPAID = "{} gains as much in the same time"


@dataclass(frozen=True)
class ChosenSteps:
    """A choice of precise steps. Gains are in dB of the error of the final latents: a mean with its interval."""

    schedule: str  # that is used; of steps c alone where none pays
    tried: str  # the best that was found
    candidates: dict[str, float]  # the gain of each schedule on the prompts that chose
    gain_db: list[float | None]  # over the recipe alone, on other prompts
    beyond_db: dict[str, list[float | None]]  # over what else takes the same time, by name, on these
    time: float | None  # that the precise steps add, as a share of the recipe's denoising; None: nothing is timed
    prompts: int  # that did not choose
    reason: str | None  # why the steps do not pay; None: they do


def products_of_steps(
    checkpoint: Checkpoint, unquantized: Variant, recipe: Variant, prompts: Sequence[str], sampling: Sampling
) -> list[list[float]]:
    """The products [1 + steps, 1 + steps] of the error with all steps precise, then of the change by each that is not.

    All are of final latents.
    """
    known = [Replacement(step, COMPUTED) for step in range(sampling.steps_taken)]
    reference = final_latents(checkpoint, unquantized, prompts, range(len(prompts)), replace(sampling, schedule=None))
    precise, changes = changed_by(checkpoint, recipe, prompts, sampling, known, WEIGHTS_ALONE)
    return products_of([precise - reference, *changes])


def predicted_gain(products: Tensor, precise: Sequence[int]) -> float:
    """By how many dB the error of the recipe falls with these steps precise, if changes add up."""
    steps = len(products) - 1

    def squared(precise: Sequence[int]) -> float:
        left = [0, *(1 + step for step in range(steps) if step not in precise)]
        return max(products[left][:, left].sum().item(), math.ulp(1.0) * products[0, 0].item(), math.ulp(0.0))

    return 10 * math.log10(squared(()) / squared(precise))


def best_steps(products: Tensor, count: int) -> list[int]:
    """The ``count`` steps whose precision lowers the predicted error most, in order.

    Exchanges of one for another go on while they gain, from the first, the last and the largest; the best end is taken.
    """
    steps = len(products) - 1

    def gain(precise: Iterable[int]) -> float:
        return predicted_gain(products, [*precise])

    def exchanged(precise: list[int]) -> list[int]:
        others = [step for step in range(steps) if step not in precise]
        return max(([*(each for each in precise if each != out), new] for out in precise for new in others), key=gain)

    largest = products.diagonal()[1:].argsort(descending=True)[:count].tolist()
    ends = []
    for chosen in ([*range(count)], [*range(steps - count, steps)], largest):
        while count < steps and gain(nearest := exchanged(chosen)) > gain(chosen) + 1e-9:
            chosen = nearest
        ends.append(chosen)
    return sorted(max(ends, key=gain))


def schedule_with(precise: Sequence[int], steps: int) -> str:
    return schedule_of([Replacement(step, WEIGHTS_ALONE) for step in precise], steps)


def first_and_last(count: int, steps: int) -> str:
    """The schedule with so many precise steps at both ends, as published checkpoints declare them."""
    return schedule_with([*range(-(-count // 2)), *range(steps - count // 2, steps)], steps)


def choose_steps(
    checkpoint: Checkpoint,
    unquantized: Variant,
    recipe: Variant,
    prompts: Sequence[str],
    sampling: Sampling,
    found: Sequence[str],
    step_time: float | None,
    controls: Mapping[str, Control],
    forced: bool,
) -> ChosenSteps:
    """The best of the ``found`` schedules: with the largest gain over the recipe, and where not ``forced``, controls.

    The first half of the prompts chooses, the other one checks. ``step_time`` is what one precise step adds, as a share
    of the recipe's denoising; None where nothing is timed. Unless ``forced``, the steps are used only where their gain
    is beyond that of each of the ``controls`` in the same time, by intervals of 95 % for all of them together.
    """

    def by(schedule: str | None) -> Latents:
        timed = replace(sampling, schedule=schedule)
        return lambda numbers: final_latents(checkpoint, recipe, prompts, numbers, timed)

    def time_of(schedule: str) -> float:
        return (step_time or 0.0) * schedule.count(WEIGHTS_ALONE)

    def gain(latents: Latents | None, numbers: Sequence[int]) -> Tensor:
        """In dB over the recipe alone, by prompt; None: full precision."""
        made = reference[numbers] if latents is None else latents(numbers)
        return plain[numbers] - errors_in_db(reference[numbers], made)

    def margin(schedule: str) -> float:
        """The gain beyond that of the best control, on the prompts that choose."""
        others = [gain(control(time_of(schedule)), choosing).mean().item() for control in controls.values()]
        return candidates[schedule] - max(others, default=0.0)

    everyone, half = range(len(prompts)), len(prompts) // 2
    choosing, checking = everyone[:half], everyone[half:]
    reference = final_latents(checkpoint, unquantized, prompts, everyone, replace(sampling, schedule=None))
    plain = errors_in_db(reference, by(None)(everyone))
    candidates = {schedule: gain(by(schedule), choosing).mean().item() for schedule in found}
    tried = max(found, key=candidates.__getitem__ if forced else margin)
    own = gain(by(tried), checking)
    beside = {name: gain(control(time_of(tried)), checking) for name, control in controls.items()}
    confidence = 1 - 0.05 / max(1, len(beside))
    beyond = {name: mean_interval((own - other).tolist(), confidence) for name, other in beside.items()}
    unpaid = [name for name, interval in beyond.items() if not interval.low > 0]
    reason = "nothing is timed" if step_time is None else UNPAID.format(unpaid[0]) if unpaid else None
    return ChosenSteps(
        schedule=tried if forced or reason is None else COMPUTED * sampling.steps_taken,
        tried=tried,
        candidates=candidates,
        gain_db=recorded_interval(mean_interval(own.tolist())),
        beyond_db={name: recorded_interval(interval) for name, interval in beyond.items()},
        time=None if step_time is None else time_of(tried),
        prompts=len(checking),
        reason=reason,
    )


def recorded_interval(interval: Interval) -> list[float | None]:
    """A figure with both ends, None for what is not finite."""
    return [each if math.isfinite(each) else None for each in interval]
