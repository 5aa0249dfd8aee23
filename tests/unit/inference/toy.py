"""A pipeline of a few numbers, by which schedules are chosen, and engines that are functions."""

from types import SimpleNamespace

import torch

from sd_quant.inference.calls import Calls
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.samplers import engine_of_letter

TEN = 10
TEN_STEPS = Sampling(steps=TEN, guidance_scale=1, height=64, width=64, batch_size=2, seed=0)
CHECKPOINT = SimpleNamespace(family=SimpleNamespace(DENOISER="unet"))
# The velocity changes at two steps alone; elsewhere an output that is used again costs nothing.
JUMPS = (3, 7)


class Toy:
    """A pipeline of Euler steps. The text encoder is asked once a batch, the denoiser once a step."""

    calls = 0

    def __init__(self, engines):
        self.engines = engines

    def __call__(self, prompts, sampling, *, numbers, decode, on_step):
        latents = [self.image(batch, sampling, on_step) for batch in sampling.batches(list(numbers))]
        return SimpleNamespace(latents=torch.cat(latents))

    def image(self, numbers, sampling, on_step):
        text = self.engines["clip"](number=torch.tensor(numbers, dtype=torch.float))["z"]
        done, x = [], torch.zeros(len(numbers), 1, 1)
        calls = Calls(sampling.schedule, lambda: len(done), lambda step: True, ())
        for step in range(sampling.steps):
            on_step(step)
            at = torch.tensor(step * TEN / sampling.steps)
            output = calls(
                lambda inputs, letter: self.engines[engine_of_letter("unet", letter)](**inputs),
                {"at": at, "text": text},
            )["out"]
            x = x + output / sampling.steps
            done.append(x)
        return torch.stack(done, dim=1)


def engines():
    def unet(at, text):
        Toy.calls += 1
        return {"out": (1 + sum((at >= jump).float() for jump in JUMPS) + 0.01 * text)[:, None, None]}

    return {"clip": lambda number: {"z": number}, "unet": unet}


SAMPLING = Sampling(steps=3, guidance_scale=2.0, height=64, width=64, batch_size=2, seed=5)


PROMPTS = ["one", "four", "three"]  # of different lengths, which is all that the tokenizer here sees


class Function:
    def __init__(self, name, function):
        self.name, self.function, self.calls = name, function, []

    def __call__(self, **inputs):
        self.calls.append(inputs)
        return self.function(**inputs)
