"""The calls that are timed: one of a part, and one that makes a batch of images from prompts to pixels.

A part is called with random inputs, because latency does not depend on their values. The road not taken is to time the
calls that a pipeline makes, which include its copies between devices and dtypes.

Variants of a model differ in the denoiser alone, so the speed-up of an image follows from the speed-up of a denoiser's
call and the *rest*: the time of an image outside the denoiser, as a share of the time inside, both measured in the same
image, so that a slow machine changes neither the share nor the speed-up. Calls are short: a hundred of each engine can
be interleaved while the machine changes little. The road not taken is to compare whole images alone, of which only a
few fit into the same time. A few of both variants are made nevertheless, and the record says whether they agree.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps

import torch

from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.tiles import decode
from sd_quant.inference.watched import WatchedEngine
from sd_quant.metrics.latency import Clock, Rounds, Stopping, clock_of, measure_together, wall_clock
from sd_quant.models.checkpoint import Checkpoint, denoisers_of, samples_per_image
from sd_quant.models.parts import Contract, filled

WARMUP_IMAGES = 1


def samples_per_call(checkpoint: Checkpoint, part: str, sampling: Sampling) -> int:
    """The batch of one call of the part: in a step it is doubled where guidance computes two samples per image."""
    denoises = part in denoisers_of(checkpoint) or checkpoint.parts()[part].in_steps
    return sampling.batch_size * (samples_per_image(checkpoint, sampling.guidance_scale) if denoises else 1)


def part_call(engine: Engine, contract: Contract, samples: int, sampling: Sampling) -> Callable[[], object]:
    """A call of a part with random inputs for ``samples``, which have the engine's device and dtypes already."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, shape in contract.shapes_for(samples, sampling.width, sampling.height).items():
        dtype = contract.dtypes[name]
        floating = dtype.is_floating_point
        inputs[name] = torch.randn(shape, generator=generator).to(dtype) if floating else filled(name, shape, dtype)
    on_device = cast_inputs(engine.inputs, inputs, engine.device)
    if sampling.vae_tile is not None and "z" in on_device:  # of the decoder: as many calls as an image takes
        return lambda: decode(lambda z: engine(z=z)["dec"], on_device["z"], sampling.vae_tile)
    return lambda: engine(**on_device)


@dataclass(frozen=True)
class ImageTimes:
    """Times of images of one variant."""

    totals: list[float]  # milliseconds
    rest: float  # the time outside the denoisers as a share of the time inside
    rounds: Rounds | None = None  # None where nothing was made: see ``image_of_parts``


class Stopwatch:
    """``engines``, whose calls add up to ``milliseconds``, and the rests of the images that they helped to make."""

    def __init__(self, engines: Mapping[str, Engine]):
        self.engines = {name: TimedEngine(engine, self) for name, engine in engines.items()}
        self.milliseconds, self.rests = 0.0, list[float]()

    def clock(self) -> Clock:
        """The wall clock of a call that makes images with this engine; it notes their rest."""

        @wraps(wall_clock)
        def timed(call: Callable[[], object]) -> float:
            self.milliseconds = 0.0
            total = wall_clock(call)
            self.rests.append(max(0.0, total - self.milliseconds) / self.milliseconds)
            return total

        return timed


class TimedEngine(WatchedEngine):
    def __init__(self, engine: Engine, watch: Stopwatch):
        super().__init__(engine)
        self.watch = watch

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        self.watch.milliseconds += clock_of(self.device)(lambda: outputs.update(self.engine(**inputs)))
        return outputs


def image_times(
    checkpoint: Checkpoint,
    variants: Mapping[str, Mapping[str, Engine]],
    prompts: Sequence[str],
    samplings: Mapping[str, Sampling],
    stopping: Stopping,
) -> dict[str, ImageTimes]:
    """Time batches of images of each variant in interleaved rounds, after WARMUP_IMAGES that do not count."""
    others = checkpoint.parts().keys() - {*denoisers_of(checkpoint)}
    watches = {
        name: Stopwatch({each: engine for each, engine in engines.items() if each not in others})
        for name, engines in variants.items()
    }
    calls = {
        name: partial(pipeline_of(checkpoint, {**engines, **watches[name].engines}).image_of, prompts, samplings[name])
        for name, engines in variants.items()
    }
    rounds = measure_together(calls, WARMUP_IMAGES, stopping, {name: watch.clock() for name, watch in watches.items()})
    return {
        name: ImageTimes(samples, statistics.median(watches[name].rests), rounds)
        for name, samples in rounds.samples.items()
    }


def calls_in_image(checkpoint: Checkpoint, sampling: Sampling, counted: Mapping[str, int] = {}) -> dict[str, int]:
    """The calls of each denoiser in an image: one a step, or of several those that were ``counted``."""
    first, *others = denoisers_of(checkpoint)
    return {part: counted[part] for part in (first, *others)} if others and counted else {first: sampling.steps_taken}


def calls_beside(checkpoint: Checkpoint, part: str, calls: Mapping[str, int]) -> int:
    """The calls of a part that is no denoiser in an image of so many ``calls`` of each denoiser."""
    return sum(calls.values()) if checkpoint.parts()[part].in_steps else 1


def image_of_parts(checkpoint: Checkpoint, medians: Mapping[str, float], calls: Mapping[str, int]) -> ImageTimes:
    """The time of an image added up from its parts' ``medians``, where memory does not hold all of them at once.

    ``calls`` are those of each denoiser in it.
    """
    denoising = sum(count * medians[part] for part, count in calls.items())
    others = medians.keys() - calls.keys()
    rest = sum(medians[part] * calls_beside(checkpoint, part, calls) for part in others)
    return ImageTimes([denoising + rest], rest / denoising)
