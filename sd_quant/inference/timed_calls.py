"""Time measurements of single parts, and of whole pipeline calls from prompts to pixels.

A part is called with random inputs, because latency does not depend on their values. Alternative not taken: timing the
calls within a pipeline, which include its copies between devices and dtypes.

Variants of a model, such as quantized ones, differ in the denoiser alone, so an image's speed-up follows from that of a
denoiser call and the *rest*: an image's time outside the denoiser divided by its time inside, a ratio that a slow
machine hardly changes. A hundred short calls of each engine can be interleaved while the machine changes little.
Alternative not taken: timing whole images only, of which few fit into the time; some are timed as a check.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch import Tensor

from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.tiles import in_tiles
from sd_quant.inference.watched import WatchedEngine
from sd_quant.metrics.latency import Clock, Rounds, Stopping, clock_of, measure_together, wall_clock
from sd_quant.models.checkpoint import Checkpoint, denoisers_of, samples_per_image
from sd_quant.models.parts import Contract, filled

WARMUP_IMAGES = 1


def samples_per_call(checkpoint: Checkpoint, part: str, sampling: Sampling) -> int:
    """Return the batch size of one call of the part: with guidance, denoising may take two samples per image."""
    denoises = part in denoisers_of(checkpoint) or checkpoint.parts()[part].in_steps
    return sampling.batch_size * (samples_per_image(checkpoint, sampling.guidance_scale) if denoises else 1)


def part_call(engine: Engine, contract: Contract, samples: int, sampling: Sampling) -> Callable[[], object]:
    """Return a function that calls a part with random inputs for ``samples``, on the engine's device in its dtypes."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, shape in contract.shapes_for(samples, sampling.width, sampling.height).items():
        dtype = contract.dtypes[name]
        floating = dtype.is_floating_point
        inputs[name] = torch.randn(shape, generator=generator).to(dtype) if floating else filled(name, shape, dtype)
    on_device = cast_inputs(engine.inputs, inputs, engine.device)
    tile = sampling.vae_tile if "z" in on_device else None  # of the decoder: as many calls as an image takes
    return lambda: in_tiles(lambda inputs: engine(**inputs), on_device, tile)


@dataclass(frozen=True)
class ImageTimes:
    """The measured times of one variant's images."""

    totals: list[float]  # milliseconds
    rest: float  # the time outside the denoisers as a share of the time inside
    rounds: Rounds | None = None  # None for the estimate of ``image_of_parts``


class Stopwatch:
    """Engines whose call times are summed; ``rests`` has each image's time outside of them over the time inside."""

    def __init__(self, engines: Mapping[str, Engine]):
        self.engines = {name: self.watched(engine) for name, engine in engines.items()}
        self.milliseconds, self.rests = 0.0, list[float]()

    def watched(self, engine: Engine) -> Engine:
        def timed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            outputs: dict[str, Tensor] = {}
            self.milliseconds += clock_of(engine.device)(lambda: outputs.update(engine(**inputs)))
            return outputs

        return WatchedEngine(engine, timed)

    def clock(self) -> Clock:
        """Return a clock for calls that make images with these engines; it appends to ``rests``."""

        @wraps(wall_clock)
        def timed(call: Callable[[], object]) -> float:
            self.milliseconds = 0.0
            total = wall_clock(call)
            self.rests.append(max(0.0, total - self.milliseconds) / self.milliseconds)
            return total

        return timed


def image_times(
    checkpoint: Checkpoint,
    variants: Mapping[str, Mapping[str, Engine]],
    prompts: Sequence[str],
    samplings: Mapping[str, Sampling],
    stopping: Stopping,
) -> dict[str, ImageTimes]:
    """Time images in rounds, each with a batch of every variant, after WARMUP_IMAGES that do not count."""
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
    """Return calls per image by denoiser: one call a step, or ``counted`` (by denoiser) if there are several."""
    first, *others = denoisers_of(checkpoint)
    return {part: counted[part] for part in (first, *others)} if others and counted else {first: sampling.steps_taken}


def calls_beside(checkpoint: Checkpoint, part: str, calls: Mapping[str, int]) -> int:
    """Return how often an image calls a part that is no denoiser; ``calls`` are those of the denoisers."""
    return sum(calls.values()) if checkpoint.parts()[part].in_steps else 1


def image_of_parts(checkpoint: Checkpoint, medians: Mapping[str, float], calls: Mapping[str, int]) -> ImageTimes:
    """Estimate an image's time from its parts' median times (ms) and its denoisers' ``calls``, if memory is short."""
    denoising = sum(count * medians[part] for part, count in calls.items())
    others = medians.keys() - calls.keys()
    rest = sum(medians[part] * calls_beside(checkpoint, part, calls) for part in others)
    return ImageTimes([denoising + rest], rest / denoising)
