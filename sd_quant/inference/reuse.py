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
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.inference.samplers import COMPUTED, EXTRAPOLATED, REUSED
from sd_quant.inference.watched import Answer, Outputs


@dataclass(frozen=True, order=True)
class Replacement:
    """One step whose output is not computed."""

    step: int
    letter: str


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
