"""Step caching and precision by step: how each call of the denoiser gets its output.

A schedule has a letter for each step: ``c`` computes the output, ``r`` reuses the last computed output, and ``e``
extrapolates the last two linearly in the step's number. Under Euler, reusing an output leaves that noise level out, and
extrapolation is a linear multistep method. The letters cover step caches that store outputs alone, for any engine:
cache-dit's ``steps_computation_mask`` (1 is ``c``, 0 is ``r``), and TaylorSeer of order 0 and 1 on the output
(arXiv:2503.06923, diffusers' ``use_lite_mode``). Alternatives not taken: caches inside of the network, which would be
cut into several engines, and thresholds on the latents, with which an image's time depends on its prompt and batch.

Two letters compute a step more precisely: ``h`` multiplies the stored weights with unquantized inputs (W8A16, W4A16),
``f`` is full precision; each letter has its own engine (``engine_of_letter``). All calls of a step use one engine, so
that conditional and unconditional outputs agree, as in vLLM-Omni (pull request 6560) and diffusers (14664).
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sd_quant.inference.schedules import NOT_COMPUTED, REUSED

Outputs = Mapping[str, Tensor]


class Calls:
    """The denoiser's calls for one batch of images, each computed, reused or extrapolated by the ``schedule``.

    ``step`` returns the number of the scheduler's current step, in which the denoiser may be called several times.
    ``place`` maps that number to an index of ``schedule``.
    """

    def __init__(self, schedule: str, step: Callable[[], int], place: Callable[[int], int] = int):
        self.schedule, self.step, self.place_of = schedule, step, place
        self.at, self.place = -1, 0  # the step of the last call, and its place among that step's calls
        self.known: dict[int, list[tuple[int, Outputs]]] = {}  # by place: the last two computed outputs and their steps

    def __call__(self, compute: Callable[[Outputs, str], Outputs], inputs: Outputs) -> Outputs:
        """Return the outputs: ``compute(inputs, letter)`` where the step computes, otherwise from earlier outputs."""
        step = self.step()
        self.place = self.place + 1 if step == self.at else 0
        self.at = step
        letter, known = self.schedule[self.place_of(step)], self.known.setdefault(self.place, [])
        if letter in NOT_COMPUTED:
            outputs = known[-1][1] if letter == REUSED or len(known) < 2 else line(known, step)
            return {name: tensor.clone() for name, tensor in outputs.items()}
        outputs = compute(inputs, letter)
        self.known[self.place] = [*known[-1:], (step, outputs)]
        return outputs


def line(known: Sequence[tuple[int, Outputs]], step: int) -> dict[str, Tensor]:
    """Extrapolate two earlier outputs, ``known`` with the numbers of their steps, linearly to ``step``."""
    (first, a), (second, b) = known
    ahead = (step - second) / (second - first)
    return {name: b[name] + ahead * (b[name] - a[name]) for name in b}
