"""Choose the denoising steps that multiply unquantized inputs, by the error of each step's quantization in the image.

In a run with unquantized inputs (all steps *precise*), one step at a time gets quantized inputs, and the change of the
final latents is kept as a vector. These changes add up nearly linearly, so the error of any choice is the norm of a
sum: the error with all steps precise, plus the changes by the quantized steps. The vectors' Gram matrix gives this
norm without another call, and finds errors that cancel. An exchange search finds the best steps; runs of the quantized
engines compare them with the first and last steps, which published checkpoints keep precise.

Alternatives not taken: a threshold on the change from step to step, which ignores an error's effect on the image, and a
search by generated images, hundreds for each number of steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.reuse import Replacement, Variant, changed_by, final_latents, products_of, schedule_of
from sd_quant.inference.schedules import COMPUTED, WEIGHTS_ALONE
from sd_quant.models.checkpoint import Checkpoint


def products_of_steps(
    checkpoint: Checkpoint, unquantized: Variant, recipe: Variant, prompts: Sequence[str], sampling: Sampling
) -> list[list[float]]:
    """Return the Gram matrix [1 + steps, 1 + steps] of the error with all inputs unquantized and each step's change."""
    known = [Replacement(step, COMPUTED) for step in range(sampling.steps_taken)]
    reference = final_latents(checkpoint, unquantized, prompts, range(len(prompts)), replace(sampling, schedule=None))
    precise, changes = changed_by(checkpoint, recipe, prompts, sampling, known, WEIGHTS_ALONE)
    return products_of([precise - reference, *changes])


def predicted_gain(products: Tensor, precise: Sequence[int]) -> float:
    """Return by how many dB unquantized inputs in the steps ``precise`` lower the error, if changes add linearly."""
    steps = len(products) - 1

    def squared(precise: Sequence[int]) -> float:
        left = [0, *(1 + step for step in range(steps) if step not in precise)]
        return max(products[left][:, left].sum().item(), math.ulp(1.0) * products[0, 0].item(), math.ulp(0.0))

    return 10 * math.log10(squared(()) / squared(precise))


def best_steps(products: Tensor, count: int) -> list[int]:
    """Return the ``count`` steps, ascending, that lower the predicted error most with unquantized layer inputs.

    The best of three exchange searches: from the first steps, the last ones, and those with the largest changes.
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
