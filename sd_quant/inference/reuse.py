"""Select the denoising steps that reuse a cached output (step caching), for a given number of saved calls.

In full precision, the output of one step at a time is replaced, and the resulting error of the *final* latents is kept
as a vector. These errors add nearly linearly, so the Gram matrix of the vectors gives the error of any set of steps
without another call, and finds steps whose errors cancel. An exchange search from several starts finds the best sets;
runs of the quantized engines choose among them. Alternatives not taken: the change from step to step as a measure
(TeaCache, MagCache, EasyCache), which ignores an error's effect on the image; and annealing of whole schedules
(BudCache, arXiv:2606.13496), which takes hundreds of images for each number of saved calls.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sd_quant.engines.base import Engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.schedules import COMPUTED, EXTRAPOLATED, REUSED, engine_of_letter
from sd_quant.inference.watched import Answer, Outputs, ReplayedVariant
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.progress import progress

CHOOSING = 8  # prompts by which a schedule is chosen, and as many others on which its error is reported
Variant = Mapping[str, Engine]  # engines by part
SMALLEST = 1e-12  # error of latents that are equal


@dataclass(frozen=True, order=True)
class Replacement:
    """A denoising step whose output is replaced, and how: a letter of ``calls``, such as ``r`` for a reused output."""

    step: int
    letter: str


def schedule_of(replaced: Sequence[Replacement], steps: int, base: str = COMPUTED) -> str:
    """Return the schedule of ``steps`` letters: those of the replacements, and ``base`` elsewhere."""
    letters = {each.step: each.letter for each in replaced}
    return "".join(letters.get(step, base) for step in range(steps))


def replacements(steps: int) -> list[Replacement]:
    """Return all replacements: reuse in any step except first and last, extrapolation also not in the second step."""
    reused = [Replacement(step, REUSED) for step in range(1, steps - 1)]
    return reused + [Replacement(step, EXTRAPOLATED) for step in range(2, steps - 1)]


def evenly_spread(steps: int, count: int) -> list[Replacement]:
    """Return ``count`` reused steps, evenly spread without neighbours, and without the first and last step."""
    free = steps - 2 - (count - 1)  # places, if each reused step but the last brings a computed one along
    return [Replacement(1 + number + (2 * number + 1) * free // (2 * count), REUSED) for number in range(count)]


def best_replacements(known: Sequence[Replacement], products: Tensor, count: int) -> list[Replacement]:
    """Return the ``count`` of the ``known`` replacements, no two adjacent, with the least predicted error.

    ``products`` [known, known] is the Gram matrix of their errors. An exchange search starts from steps evenly spread
    over the first 2 * count + 1 steps, then over one step more, and so on to all steps; the best result wins.
    """
    place = {each: number for number, each in enumerate(known)}
    step = torch.tensor([each.step for each in known])
    beside = (step[:, None] - step).abs() <= 1  # of the same step, too

    def error(chosen: Sequence[int]) -> float:
        return products[chosen][:, chosen].sum().item()

    def exchanged(chosen: Sequence[int], out: int) -> list[int]:
        """Return ``chosen`` with its entry number ``out`` exchanged for the best replacement."""
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


def answers_before(kept: Outputs, denoiser: str, step: int, places: Sequence[int]) -> Answer:
    """Return a lookup ``(part, number of the call) -> output`` for a run that differs from an earlier one in ``step``.

    It finds, in the earlier run's outputs ``kept``, all of other parts and the denoiser's before ``step``; None for
    later calls. ``places`` has the step of each denoiser call in a batch; the new run skips those of ``step``."""
    before, of_a_batch = sum(place < step for place in places), len(places) - places.count(step)

    def answer(part: str, number: int) -> Mapping[str, Tensor] | None:
        if part != denoiser:
            return kept[part][number] if number < len(kept[part]) else None
        batch, call = divmod(number, of_a_batch)
        return kept[part][batch * len(places) + call] if call < before else None

    return answer


def changed_by(
    checkpoint: Checkpoint,
    engines: Variant,
    prompts: Sequence[str],
    sampling: Sampling,
    known: Sequence[Replacement],
    base: str = COMPUTED,
) -> tuple[Tensor, list[Tensor]]:
    """Return final latents with the letter ``base`` in all steps, and their change by each replacement in ``known``."""
    steps, numbers = sampling.steps_taken, range(len(prompts))
    batches, denoiser = len(sampling.batches(numbers)), engine_of_letter(checkpoint.family.DENOISER, base)
    whole, changes, places = ReplayedVariant(engines), list[Tensor](), list[int]()
    full = final_latents(checkpoint, whole, prompts, numbers, replace(sampling, schedule=base * steps), places.append)
    places = places[: len(places) // batches]
    with progress(len(known), "each step alone by another call") as advance:
        for each in known:
            replaced = replace(sampling, schedule=schedule_of([each], steps, base))
            answer = answers_before(whole.outputs, denoiser, each.step, places)
            made = final_latents(checkpoint, ReplayedVariant(engines, answer), prompts, numbers, replaced)
            changes.append(made - full)
            advance()
    return full, changes


def products_of(errors: Sequence[Tensor]) -> list[list[float]]:
    """Return the Gram matrix of the errors, as flat vectors, in fp64."""
    flat = torch.stack([each.double().flatten() for each in errors])
    return (flat @ flat.T).tolist()


def candidates(products: Sequence[Sequence[float]], steps: int, saved: int) -> list[str]:
    """Return schedules that save ``saved`` calls: best reuse, best of reuse and extrapolation, evenly spread reuse."""
    known, all_of_them = replacements(steps), torch.tensor(products, dtype=torch.float64)
    reused = [number for number, each in enumerate(known) if each.letter == REUSED]
    found = [
        best_replacements([known[each] for each in reused], all_of_them[reused][:, reused], saved),
        best_replacements(known, all_of_them, saved),
        evenly_spread(steps, saved),
    ]
    return list(dict.fromkeys(schedule_of(each, steps) for each in found))


def choose_schedule(
    checkpoint: Checkpoint,
    unquantized: Variant,
    recipe: Variant,
    prompts: Sequence[str],
    sampling: Sampling,
    found: Sequence[str],
    half: int,
) -> dict[str, Any]:
    """Choose the schedule among ``found`` with the least error of the recipe; return the record's ``levers.chosen``.

    The first ``half`` prompts decide. On the remaining prompts the chosen schedule is compared with the evenly spread
    one (the last of ``found``), and with fewer steps of the same sampler, as many as computed calls. Extrapolation
    amplifies quantization errors of the last two outputs, so the best schedule depends on the recipe.
    """
    steps, saved = sampling.steps_taken, len(found[-1]) - found[-1].count(COMPUTED)

    def errors_on(numbers: Sequence[int], *changes: Mapping[str, Any]) -> list[float]:
        reference = final_latents(checkpoint, unquantized, prompts, numbers, sampling)
        made = [final_latents(checkpoint, recipe, prompts, numbers, replace(sampling, **each)) for each in changes]
        return [typical_error(reference, each) for each in made]

    measured = errors_on(range(half), *({"schedule": each} for each in found))
    best = min(zip(measured, found, strict=True))[1]
    fewer = math.ceil((steps - saved) * sampling.steps / steps)
    checking = range(half, len(prompts))
    error, even, few = errors_on(checking, {"schedule": best}, {"schedule": found[-1]}, {"steps": fewer})
    return {
        "schedule": best, "candidates": dict(zip(found, measured, strict=True)),
        "error": error, "even_error": even, "fewer_error": few, "prompts": len(checking),
    }  # fmt: skip


def final_latents(
    checkpoint: Checkpoint,
    variant: Variant,
    prompts: Sequence[str],
    numbers: Sequence[int],
    sampling: Sampling,
    on_step: Callable[[int], object] = lambda step: None,
) -> Tensor:
    """Return the last latents [N, ...] of the N prompts with these ``numbers``; call ``on_step`` with each step."""
    made = pipeline_of(checkpoint, variant)(prompts, sampling, numbers=numbers, decode=(), on_step=on_step)
    return torch.stack([each[-1] for each in made.latents])


def typical_error(reference: Tensor, latents: Tensor) -> float:
    """Return the geometric mean of the images' relative errors, which a few large errors cannot dominate."""
    return 10 ** (errors_in_db(reference, latents).mean().item() / 20)


def errors_in_db(reference: Tensor, latents: Tensor) -> Tensor:
    """Return 20 log10(||latents - reference|| / ||reference||) of each image, fp64 [N]; both arguments are [N, ...]."""
    errors = (latents - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    return 20 * errors.double().clamp_min(SMALLEST).log10()
