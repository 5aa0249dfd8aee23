"""The denoiser's calls in an image: computed in one precision or another, reused, guided.

A schedule has a letter for each step: ``c`` computed, ``r`` the last computed output reused, ``e`` the line through the
last two, over the number of the step. Under Euler, reusing the output leaves that noise level out, and the line is a
linear multistep method; so letters cover step caches whose state is the output: cache-dit's
``steps_computation_mask`` (1 is ``c``, 0 is ``r``), and TaylorSeer of order 0 and 1 on the output (arXiv:2503.06923,
diffusers' ``use_lite_mode``), for any engine. The roads not taken are caches inside of the network, for which it would
be cut into several engines, and thresholds on the latents, by which an image's time depends on its prompt and batch.

A computed step may be precise: ``h`` multiplies the stored weights with unquantized inputs (W8A16, W4A16), ``f`` is
full precision; each has an engine of its own, by ``engine_of_letter``. All calls of a step have its precision, so that
guided and unguided ones agree, as in vLLM-Omni (pull request 6560) and diffusers (14664).

Below a noise level an image needs no guidance (Kynkäänniemi et al. 2024, arXiv:2404.07724): the conditional half of the
batch is computed alone, and is given twice, which makes the guided output the conditional one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from sd_quant.inference.samplers import COMPUTED, NOT_COMPUTED, REUSED

Outputs = Mapping[str, Tensor]


class Calls:
    """The outputs of the denoiser for the calls of one batch of images.

    ``step`` returns the number of the current step, which may have several calls; ``place`` its letter's in the
    schedule, for samplers of several steps a letter. ``is_guided`` decides by step. ``batched`` names the inputs whose
    first axis counts samples, the unconditional ones first.
    """

    def __init__(
        self,
        schedule: str | None,
        step: Callable[[], int],
        is_guided: Callable[[int], bool],
        batched: Collection[str],
        place: Callable[[int], int] = int,
    ):
        self.step, self.is_guided, self.batched = step, is_guided, batched
        self.letter = (lambda step: COMPUTED) if schedule is None else lambda step: schedule[place(step)]
        self.at, self.place = -1, 0  # the step of the last call, and its place among that step's calls
        self.known: dict[int, list[tuple[int, Outputs]]] = {}  # by place: the last two computed outputs and their steps

    def __call__(self, compute: Callable[[Outputs, str], Outputs], inputs: Outputs) -> Outputs:
        """The outputs for ``inputs``: by ``compute`` with the step's letter, or from earlier ones."""
        step = self.step()
        self.place = self.place + 1 if step == self.at else 0
        self.at = step
        letter = self.letter(step)
        known, guided = self.known.setdefault(self.place, []), self.is_guided(step)
        if letter in NOT_COMPUTED:
            outputs = known[-1][1] if letter == REUSED or len(known) < 2 else line(known, step)
            return {name: tensor.clone() if guided else twice(halved(tensor)) for name, tensor in outputs.items()}
        if guided:
            outputs = compute(inputs, letter)
        else:
            half = {name: halved(tensor) if name in self.batched else tensor for name, tensor in inputs.items()}
            outputs = {name: twice(tensor) for name, tensor in compute(half, letter).items()}
        self.known[self.place] = [*known[-1:], (step, outputs)]
        return outputs


def line(known: Sequence[tuple[int, Outputs]], step: int) -> dict[str, Tensor]:
    """The outputs at ``step`` of the straight line through two earlier ones."""
    (first, a), (second, b) = known
    ahead = (step - second) / (second - first)
    return {name: b[name] + ahead * (b[name] - a[name]) for name in b}


def halved(tensor: Tensor) -> Tensor:
    """The second half of a batch: its conditional samples."""
    return tensor[len(tensor) // 2 :]


def twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])
