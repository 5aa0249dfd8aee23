"""What is timed: one call of a part, and one batch of images from prompt to pixels.

A part is called with random inputs, because latency does not depend on their values. The road not taken is to time the
calls that a pipeline makes: they would include its copies between devices and dtypes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.inference.pipeline import Pipeline, Sampling
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
    """A call of the pipeline that makes one batch of images of the first prompts, which are repeated to fill it."""
    batch = (list(prompts) * sampling.batch_size)[: sampling.batch_size]
    return lambda: pipeline(batch, sampling)


def composed_latency(medians: Mapping[str, float], steps: int, denoiser: str) -> dict:
    """The latency of an image, added up from its parts' ``medians``; the denoiser is called ``steps`` times."""
    milliseconds = sum(median * (steps if part == denoiser else 1) for part, median in medians.items())
    return {"p50_ms": milliseconds, "composed": "from single calls, as memory does not hold everything at once"}
