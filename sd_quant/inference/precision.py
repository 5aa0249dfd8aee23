"""Choose the denoising steps that multiply unquantized inputs, by the error of each step's quantization in the image.

With all steps precise, the inputs of one step after the other are quantized alone, and the change of the *final*
latents is kept as a vector. Such changes add up nearly linearly, so the error of any choice is the norm of a sum: the
error with all steps precise, and the changes by all others. The vectors' products give it without another call, and
errors that cancel are found. The best steps are searched by exchanges, beside the first and last ones that published
checkpoints declare; the recipe's own engines decide.

The roads not taken are a threshold on the change from step to step, which does not see an error's end, and a search by
images, hundreds for each number.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.reuse import Replacement, Variant, changed_by, final_latents, products_of, schedule_of
from sd_quant.inference.samplers import COMPUTED, WEIGHTS_ALONE
from sd_quant.models.checkpoint import Checkpoint


def products_of_steps(
    checkpoint: Checkpoint, unquantized: Variant, recipe: Variant, prompts: Sequence[str], sampling: Sampling
) -> list[list[float]]:
    """Products [1 + steps, 1 + steps] of the final latents' error with all steps precise, and of each step's change."""
    known = [Replacement(step, COMPUTED) for step in range(sampling.steps_taken)]
    reference = final_latents(checkpoint, unquantized, prompts, range(len(prompts)), replace(sampling, schedule=None))
    precise, changes = changed_by(checkpoint, recipe, prompts, sampling, known, WEIGHTS_ALONE)
    return products_of([precise - reference, *changes])


def predicted_gain(products: Tensor, precise: Sequence[int]) -> float:
    """The dB by which the recipe's error falls with these steps precise, if changes add up."""
    steps = len(products) - 1

    def squared(precise: Sequence[int]) -> float:
        left = [0, *(1 + step for step in range(steps) if step not in precise)]
        return max(products[left][:, left].sum().item(), math.ulp(1.0) * products[0, 0].item(), math.ulp(0.0))

    return 10 * math.log10(squared(()) / squared(precise))


def best_steps(products: Tensor, count: int) -> list[int]:
    """The ``count`` steps whose precision lowers the predicted error most, in order.

    Exchanges go on while they gain, from the first, the last and the largest; the best end is taken.
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
