"""Figures of a candidate against full precision: errors of its layers, and images and latency of its own library.

If the library for which a checkpoint was made works on this machine, it makes the images again, which checks our
reading of the file, and its denoiser is timed in the same rounds as torch in full precision.
"""

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from sd_quant.engines.pool import Pool
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated
from sd_quant.interchange.errors import LayerErrors, alone, layer_errors
from sd_quant.metrics.fidelity import psnr, summary
from sd_quant.metrics.images import score_pairs
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.numbers import relative_error
from sd_quant.progress import progress
from sd_quant.report.record import ImageScores, JudgedRuntime
from sd_quant.simulation.sensitivity import guided
from sd_quant.stages.baseline import Baseline
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.latency import denoiser_rounds
from sd_quant.stages.shared import VariantOutputs
from sd_quant.stages.third_party import Subject
from sd_quant.stages.variants import FRAMEWORK, QUANTIZED
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
# pool keys of a candidate's denoiser: as sd-quant reads it, with unquantized inputs, and in its own library
THEIRS, LIBRARY = "theirs", "library"


def keys_of(subject: Subject) -> dict[str, str]:
    """Return the keys in the engine pool of the candidate's quantized parts, by part, the denoiser first."""
    first, *others = subject.parts
    return {first: THEIRS} | {part: f"{THEIRS} {part}" for part in others}


def layer_rows(
    subject: Subject, baseline: Baseline, reference: VariantOutputs, pool: Pool, outputs: Tensor
) -> tuple[list[dict[str, Any]], float | None]:
    """Return the rows of ``layers.csv``, and the relative error of ``outputs`` (by the candidate's denoiser)."""
    full = cast(TorchEngine, pool[baseline.denoiser])
    network = denoiser_of(baseline.session.checkpoint, full.module)

    def run() -> Tensor:
        return network_outputs(full, reference, baseline)

    expected = run()
    with progress(len(reference.calls) * len(subject.layers), f"layers of {subject.name}") as advance:
        errors = layer_errors(network, subject.layers, run, advance)
    ranked = sorted(errors, key=lambda name: -(errors[name].output or 0))[: baseline.judge.layers]
    with progress(len(ranked), f"layers of {subject.name}, each alone") as advance:
        in_network = alone(network, subject.layers, ranked, run, advance)
    rows = []
    for row in subject.denoiser.rows:
        own = errors.get(row["name"], LayerErrors(None, row.get("output_error")))
        found = {"weight_error": own.weight, "output_error": own.output, "network_error": in_network.get(row["name"])}
        rows.append(row | found)
    return rows, relative_error(expected, outputs)


def network_outputs(
    engine: Callable[..., Mapping[str, Tensor]], reference: VariantOutputs, baseline: Baseline
) -> Tensor:
    """Return the denoiser's outputs, flattened, with guidance applied, for the inputs in ``reference.calls``."""
    outputs = []
    for inputs in reference.calls.values():
        (output, *_) = engine(**inputs).values()
        outputs.append(guided(output.float().cpu(), baseline.infer.scale).flatten())
    return torch.cat(outputs)


def judged_runtime(subject: Subject, baseline: Baseline, simulated: Generated, pool: Pool) -> JudgedRuntime:
    """Compare images of the candidate's own library with the ``simulated`` images, and time it beside torch."""
    if subject.runtime is None:
        return JudgedRuntime(reason=subject.no_runtime)
    if not baseline.judge.runtimes:
        return JudgedRuntime(reason="judge.runtimes is false")
    if not baseline.together:
        return JudgedRuntime(reason="memory does not hold it beside the full-precision model")
    found = JudgedRuntime(name=subject.runtime.name)
    try:
        variant = baseline.variant(pool, keys_of(subject) | {baseline.denoiser: LIBRARY})
        pipeline = pipeline_of(baseline.session.checkpoint, variant)
        images = generate(
            pipeline, baseline.prompts, sampling_of(baseline.infer), f"{subject.name} by {subject.runtime.name}"
        ).images
        found["agreement"] = cast(ImageScores, summary(score_pairs(psnr, simulated.images, images)))
        engines = {FRAMEWORK: pool[baseline.denoiser], QUANTIZED: pool[LIBRARY]}
        if len({engine.device.type for engine in engines.values()}) > 1:  # times of different devices are not compared
            return found
        rounds = denoiser_rounds(baseline.session.checkpoint, engines, baseline.infer, baseline.timing)
    except Exception as error:  # third-party code may raise anything; the simulated figures remain
        LOG.warning("%s: %s failed: %r", subject.name, subject.runtime.name, error)
        return JudgedRuntime(name=subject.runtime.name, reason=f"it failed with {one_line(repr(error), 200)}")
    samples = rounds.samples
    interval = ratio_interval(samples[FRAMEWORK], samples[QUANTIZED], rounds.openings)
    return found | JudgedRuntime(
        ms=statistics.median(samples[QUANTIZED]),
        torch_ms=statistics.median(samples[FRAMEWORK]),
        speedup=interval.value,
        speedup_interval=[interval.low, interval.high] if math.isfinite(interval.high) else None,
    )
