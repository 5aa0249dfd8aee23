"""What is timed: one call of a part, and one batch of images from prompt to pixels.

A part is called with random inputs, because latency does not depend on their values. The road not taken is to time the
calls that a pipeline makes: they would include its copies between devices and dtypes.

Two variants of a model differ in the denoiser alone. So the speed-up of an image follows from that of the denoiser's
call and from what an image takes beside these calls, which is measured once, as a share of what they take in the same
image: what slows a machine slows both. Calls of the denoiser are short and can be interleaved a hundred times while a
machine changes little; the road not taken is to compare whole images alone, of which a few fit into the same time. A
few are made of both variants in turn all the same, and the record says whether they agree.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Pipeline, Sampling
from sd_quant.metrics.latency import Clock, Rounds, Stopping, clock_of, measure_together, wall_clock
from sd_quant.models.checkpoint import Checkpoint, samples_per_image
from sd_quant.models.parts import Contract, axes


def samples_per_call(checkpoint: Checkpoint, part: str, sampling: Sampling) -> int:
    """The batch of one call of the part: the denoiser's is doubled where guidance computes two samples per image."""
    denoises = part == checkpoint.family.DENOISER
    return sampling.batch_size * (samples_per_image(checkpoint, sampling.guidance_scale) if denoises else 1)


def part_call(engine: Engine, contract: Contract, samples: int, sampling: Sampling) -> Callable[[], object]:
    """A call of a part whose inputs are where the engine computes, in its own dtypes: a timed call copies nothing."""
    inputs = cast_inputs(engine.inputs, example_inputs(contract, samples, sampling), engine.device)
    return lambda: engine(**inputs)


def example_inputs(contract: Contract, samples: int, sampling: Sampling) -> dict[str, torch.Tensor]:
    """Random inputs of a part for a batch of ``samples``, in the contract's dtypes."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, shape in contract.shapes(**axes(samples, sampling.width, sampling.height)).items():
        dtype = contract.dtypes[name]
        values = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
        inputs[name] = values.to(dtype)
    return inputs


def image_call(pipeline: Pipeline, prompts: Sequence[str], sampling: Sampling) -> Callable[[], object]:
    """A call of the pipeline that makes one batch of images of the first prompts, which are repeated to fill it.

    All are of ``sampling.width`` x ``sampling.height``, as are the inputs of a part's call.
    """
    batch, one_size = (list(prompts) * sampling.batch_size)[: sampling.batch_size], replace(sampling, sizes=None)
    return lambda: pipeline(batch, one_size)


WARMUP_IMAGES = 1


@dataclass(frozen=True)
class ImageTimes:
    """What images of the unquantized model took."""

    totals: list[float]  # milliseconds
    rest: float  # what an image takes beside its calls of the denoiser, as a share of what those take
    rounds: Rounds | None = None  # None where nothing was made: see ``image_of_parts``


class Stopwatch:
    """``engine``, whose calls are timed, and what else an image takes."""

    def __init__(self, engine: Engine):
        self.engine, self.milliseconds, self.rests = engine, 0.0, list[float]()
        self.name, self.inputs, self.device = engine.name, engine.inputs, engine.device

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        self.milliseconds += clock_of(self.device)(lambda: outputs.update(self.engine(**inputs)))
        return outputs

    def reopen(self) -> bool:
        return self.engine.reopen()

    def close(self) -> None:
        self.engine.close()


def clock_with(watch: Stopwatch) -> Clock:
    """The wall clock of a call that makes images with the engine of ``watch``, which notes what else they take."""

    @functools.wraps(wall_clock)
    def timed(call: Callable[[], object]) -> float:
        watch.milliseconds = 0.0
        total = wall_clock(call)
        watch.rests.append(max(0.0, total - watch.milliseconds) / watch.milliseconds)
        return total

    return timed


def image_times(
    checkpoint: Checkpoint,
    variants: Mapping[str, Mapping[str, Engine]],
    prompts: Sequence[str],
    sampling: Sampling,
    stopping: Stopping,
) -> dict[str, ImageTimes]:
    """Time batches of images of each variant, in rounds as calls are, after WARMUP_IMAGES that do not count."""
    denoiser = checkpoint.family.DENOISER
    watches = {name: Stopwatch(engines[denoiser]) for name, engines in variants.items()}
    calls = {
        name: image_call(pipeline_of(checkpoint, {**engines, denoiser: watches[name]}), prompts, sampling)
        for name, engines in variants.items()
    }
    clocks = {name: clock_with(watch) for name, watch in watches.items()}
    rounds = measure_together(calls, WARMUP_IMAGES, stopping, clocks)
    return {
        name: ImageTimes(samples, statistics.median(watches[name].rests), rounds)
        for name, samples in rounds.samples.items()
    }


def image_of_parts(medians: Mapping[str, float], steps: int, denoiser: str) -> ImageTimes:
    """An image that is added up from its parts' ``medians``, where memory does not hold all of them at once."""
    denoising = steps * medians[denoiser]
    rest = sum(median for part, median in medians.items() if part != denoiser)
    return ImageTimes([denoising + rest], rest / denoising)
