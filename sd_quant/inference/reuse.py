"""Which of a denoiser's outputs are used again, so that a share of its calls is saved.

Each step's output is replaced alone, in full precision, and the error that this leaves in the *final* latents is kept
as a vector. Errors of a few replaced steps add up nearly linearly, so the error of any set of steps is the norm of the
sum of its vectors, which the matrix of their products gives without another call; steps whose errors cancel are found.
The set with the least is looked for by exchanges from several starts. Roads not taken: the change from step to step as
a measure (TeaCache, MagCache, EasyCache), which does not see what an error becomes until the end; and trying whole
schedules one by one (BudCache, arXiv:2606.13496, by annealing), which takes hundreds of images for each share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sd_quant.engines.base import Engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.samplers import COMPUTED, EXTRAPOLATED, REUSED
from sd_quant.inference.watched import Answer, Outputs, ReplayedVariant
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.progress import progress

CHOOSING = 8  # prompts by which a schedule is chosen, and as many others on which its error is reported
SMALLEST = 1e-12  # error of latents that are equal


@dataclass(frozen=True, order=True)
class Replacement:
    """One step whose output is not computed."""

    step: int
    letter: str


@dataclass(frozen=True)
class ChosenSchedule:
    """A schedule of letters, and the ``typical_error`` of final latents on prompts that did not choose it."""

    schedule: str
    error: float
    even_error: float  # of as many reused steps, evenly spread
    fewer_error: float  # of as few steps of the same sampler
    prompts: int


def schedule_of(replaced: Sequence[Replacement], steps: int) -> str:
    """The schedule of ``steps`` letters in which these are replaced."""
    letters = {each.step: each.letter for each in replaced}
    return "".join(letters.get(step, COMPUTED) for step in range(steps))


def replacements(steps: int, extrapolated: bool) -> list[Replacement]:
    """All that may be replaced: every step but the first and the last; a line needs two computed steps before it."""
    reused = [Replacement(step, REUSED) for step in range(1, steps - 1)]
    return reused + [Replacement(step, EXTRAPOLATED) for step in range(2, steps - 1) if extrapolated]


def evenly_spread(steps: int, count: int) -> list[Replacement]:
    """``count`` reused steps, spread over all but the first and the last, none beside another."""
    free = steps - 2 - (count - 1)  # places, if each reused step but the last brings a computed one along
    return [Replacement(1 + number + (2 * number + 1) * free // (2 * count), REUSED) for number in range(count)]


def best_replacements(known: Sequence[Replacement], errors: Tensor, count: int) -> list[Replacement]:
    """``count`` of the ``known`` replacements, none beside another, whose ``errors`` [known, D] have the least sum.

    Exchanges of one for another go on while they gain, from steps that are evenly spread over the first 2n + 1 of all,
    over one more, and so on to all; the best end is taken.
    """
    products = errors.double() @ errors.double().T
    place = {each: number for number, each in enumerate(known)}
    step = torch.tensor([each.step for each in known])
    beside = (step[:, None] - step).abs() <= 1  # of the same step, too

    def error(chosen: Sequence[int]) -> float:
        return products[chosen][:, chosen].sum().item()

    def exchanged(chosen: Sequence[int], out: int) -> list[int]:
        """``chosen`` with the best in the place of the one at ``out``."""
        others = [*chosen[:out], *chosen[out + 1 :]]
        added = 2 * products[others].sum(0) + products.diagonal()
        return [*others, int(added.masked_fill(beside[others].any(0), math.inf).argmin())]

    ends = []
    for last in range(2 * count + 1, max(each.step for each in known) + 3):
        chosen = [place[each] for each in evenly_spread(last, count)]
        while error(nearest := min((exchanged(chosen, out) for out in range(count)), key=error)) < error(chosen):
            chosen = nearest
        ends.append(chosen)
    return sorted(known[number] for number in min(ends, key=error))


def answers_before(kept: Outputs, denoiser: str, step: int, steps: int, batches: int) -> Answer:
    """Answers from the ``kept`` outputs of whole runs: all of other parts, and the ``denoiser``'s before a ``step``.

    That step has no call of its own.
    """
    of_a_step = len(kept[denoiser]) // (batches * steps)  # calls

    def answer(part: str, number: int) -> Mapping[str, Tensor] | None:
        if part != denoiser:
            return kept[part][number]
        batch, call = divmod(number, of_a_step * (steps - 1))
        return kept[part][batch * steps * of_a_step + call] if call < step * of_a_step else None

    return answer


def choose_schedule(
    checkpoint: Checkpoint,
    engines: Mapping[str, Engine],
    prompts: Sequence[str],
    sampling: Sampling,
    saved: int,
    extrapolated: bool,
) -> ChosenSchedule:
    """The schedule that saves this many calls with the least error of the final latents, by real runs.

    One half of the prompts chooses: each step is replaced alone, then the best sets and the evenly spread one are run.
    On the other half the chosen one is compared with that, and with as few steps of the same sampler.
    """
    steps, half = sampling.steps_taken, len(prompts) // 2
    choosing, checking = range(half), range(half, len(prompts))
    known = replacements(steps, extrapolated)

    def final(sampling: Sampling, numbers: Sequence[int], variant: Mapping[str, Engine] = engines) -> Tensor:
        latents = pipeline_of(checkpoint, variant)(prompts, sampling, numbers=numbers, decode=False).latents
        return torch.stack([each[-1] for each in latents])

    whole = ReplayedVariant(engines)
    full = final(sampling, choosing, whole)
    batches, denoiser = len(sampling.batches(choosing)), checkpoint.family.DENOISER
    errors = []
    with progress(len(known), "each step without a call of its own") as advance:
        for each in known:
            replaced = replace(sampling, schedule=schedule_of([each], steps))
            answer = answers_before(whole.outputs, denoiser, each.step, steps, batches)
            errors.append(final(replaced, choosing, ReplayedVariant(engines, answer)) - full)
            advance()
    flat = torch.stack(errors).flatten(1)
    even = schedule_of(evenly_spread(steps, saved), steps)
    reused = [number for number, each in enumerate(known) if each.letter != EXTRAPOLATED]
    found = {even, schedule_of(best_replacements([known[each] for each in reused], flat[reused], saved), steps)}
    found.add(schedule_of(best_replacements(known, flat, saved), steps))

    def error(reference: Tensor, numbers: Sequence[int], **changed: Any) -> float:
        return typical_error(reference, final(replace(sampling, **changed), numbers))

    best = min(sorted(found), key=lambda schedule: error(full, choosing, schedule=schedule))
    held_out = final(sampling, checking)
    fewer = math.ceil((steps - saved) * sampling.steps / steps)
    return ChosenSchedule(
        schedule=best,
        error=error(held_out, checking, schedule=best),
        even_error=error(held_out, checking, schedule=even),
        fewer_error=error(held_out, checking, steps=fewer),
        prompts=len(checking),
    )


def typical_error(reference: Tensor, latents: Tensor) -> float:
    """The geometric mean over images of ||latents - reference|| / ||reference||; both [N, ...].

    A few images whose composition changes decide an arithmetic mean.
    """
    errors = (latents - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    return errors.double().clamp_min(SMALLEST).log().mean().exp().item()
