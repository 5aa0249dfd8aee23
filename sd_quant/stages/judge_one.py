"""One third-party checkpoint, or run, measured beside the model in full precision.

Where the library that the checkpoint is made for computes here, it makes the images again, which says whether our
reading of the file is right, and it is timed in the same rounds as torch in full precision.
"""

import dataclasses
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from sd_quant.config import CacheFolder, Infer, Judge, Metrics, Model, Timing
from sd_quant.engines.base import Engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.files import write_json
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated
from sd_quant.inference.samplers import WEIGHTS_ALONE, engine_of_letter
from sd_quant.interchange.errors import LayerErrors, alone, layer_errors
from sd_quant.metrics.fidelity import psnr, summary
from sd_quant.metrics.images import score_pairs
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.numbers import relative_error
from sd_quant.places import shown
from sd_quant.progress import progress
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.record import Hurting, ImageScores, Judged, JudgedPart, JudgedRuntime, Record, write_record
from sd_quant.report.summary import PROVENANCE
from sd_quant.report.table import write_csv
from sd_quant.simulation.sensitivity import guided
from sd_quant.stages.compare import KeptOutputs, VariantOutputs, framework_images, save_pairs
from sd_quant.stages.generate import generate, keep_prompts, sampling_of
from sd_quant.stages.hand_over import Scores
from sd_quant.stages.latency import denoiser_rounds
from sd_quant.stages.open_parts import open_torch
from sd_quant.stages.results import shared_entries
from sd_quant.stages.session import Session, cache_of
from sd_quant.stages.subjects import Subject
from sd_quant.stages.variants import FRAMEWORK, QUANTIZED
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
HURTING = 10  # layers that a record names
# keys of a candidate's denoiser: as its reader says, in its precise steps, and by its own library
THEIRS, PRECISE, LIBRARY = "theirs", "precise", "library"


@dataclass(frozen=True)
class Baseline:
    """The model in full precision, and all that candidates are compared by."""

    session: Session
    model: Model
    infer: Infer
    judge: Judge
    timing: Timing
    cache: CacheFolder
    metrics: Metrics
    facts: dict  # as ``provenance`` has them, of the full-precision model
    together: bool  # whether memory holds two denoisers
    text: Scores | None = None  # of ``text_fidelity``, where a candidate's consumer cuts the text

    @property
    def prompts(self) -> list[str]:
        return self.infer.prompt_list()

    @property
    def categories(self) -> list[str] | None:
        return self.infer.categories()

    @property
    def denoiser(self) -> str:
        return self.session.denoiser

    def engines(self, others: Mapping[str, Callable[[], Engine]] = MappingProxyType({})) -> Pool:
        """The model's parts by name and ``others`` by theirs; one at a time if memory does not hold two denoisers."""

        def open_engine(key: str) -> Engine:
            return others[key]() if key in others else open_torch(self.session.checkpoint, self.infer, key)

        return self.session.engines(open_engine, self.together)

    def variant(self, pool: Pool, denoiser: str, others: Mapping[str, str] = MappingProxyType({})) -> Variant:
        """The model with the denoiser that ``pool`` has under this key, and ``others``, keys by part."""
        return Variant(pool, {part: part for part in self.session.parts} | {self.denoiser: denoiser, **others})

    def outputs(self, directory: Path) -> VariantOutputs:
        """Make the images of the model in full precision."""
        pool = self.engines()
        try:
            kept = KeptOutputs(self.facts, directory, cache_of(self.cache))
            variant = self.variant(pool, self.denoiser)
            return framework_images(self.session.checkpoint, variant, self.prompts, self.infer, kept)
        finally:
            pool.close()


def judge_one(subject: Subject, baseline: Baseline, reference: VariantOutputs, mark: str, folder: Path) -> None:
    """Measure one candidate and write images, layers and, last, the record with its ``mark`` into its ``folder``."""
    step, others = StageTimer(), {THEIRS: subject.open}
    others |= {key: subject.others[part].open for part, key in keys_of_others(subject).items()}
    if subject.runtime is not None:
        others[LIBRARY] = subject.runtime.open
    if subject.open_precise is not None:
        others[PRECISE] = subject.open_precise
    pool = baseline.engines(others)
    try:
        with step("images"):
            keys = keys_of_others(subject) | {engine_of_letter(baseline.denoiser, WEIGHTS_ALONE): PRECISE}
            variant = baseline.variant(pool, THEIRS, keys)
            theirs = pipeline_of(baseline.session.checkpoint, variant)
            sampling = replace(sampling_of(baseline.infer), schedule=subject.schedule)
            generated = generate(theirs, baseline.prompts, sampling, subject.name)
            comparison = VariantOutputs(reference.images | {QUANTIZED: generated}, {}, {}, {})
            save_pairs(comparison, baseline.prompts, subject.name, folder)
        with step("layers"):
            outputs = network_outputs(pool[THEIRS], reference, baseline)
            rows, network_error = layer_rows(subject, baseline, reference, pool, outputs)
            write_csv(rows_with_others(rows, subject), folder / "layers.csv")
        with step("runtime"):
            runtime = judged_runtime(subject, baseline, generated, pool)
    finally:
        pool.close()
    facts = baseline.facts | {"inputs": baseline.facts["inputs"] | {"candidate": subject.file}}
    judged = judged_entry(subject, baseline, rows, network_error, runtime)
    keep_prompts(baseline.infer, folder)
    write_json(folder / PROVENANCE, facts)
    write_record(record_of(baseline, comparison, judged, facts, step, mark), folder)


def keys_of_others(subject: Subject) -> dict[str, str]:
    """The keys of other parts than the denoiser that the candidate has quantized, by part."""
    return {part: f"{THEIRS} {part}" for part in subject.others}


def rows_with_others(rows: list[dict[str, Any]], subject: Subject) -> list[dict[str, Any]]:
    """The ``rows`` of the denoiser's layers, then those of other parts."""
    others = [
        row | {"weight_error": errors.get(row["name"])}
        for other in subject.others.values()
        for errors in [other.weight_errors()]
        for row in other.rows
    ]
    return [*rows, *others]


def network_outputs(engine: Engine, reference: VariantOutputs, baseline: Baseline) -> Tensor:
    """The denoiser's outputs, flat and with guidance applied, for the calls that were kept of torch's pipeline."""
    outputs = []
    for inputs in reference.calls.values():
        (output, *_) = engine(**inputs).values()
        outputs.append(guided(output.float().cpu(), baseline.infer.scale).flatten())
    return torch.cat(outputs)


def layer_rows(
    subject: Subject, baseline: Baseline, reference: VariantOutputs, pool: Pool, outputs: Tensor
) -> tuple[list[dict[str, Any]], float | None]:
    """The rows of ``layers.csv``, and the relative error of the network's output; the candidate's were ``outputs``."""
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
    for row in subject.rows:
        own = errors.get(row["name"], LayerErrors(None, row.get("output_error")))
        found = {"weight_error": own.weight, "output_error": own.output, "network_error": in_network.get(row["name"])}
        rows.append(row | found)
    return rows, relative_error(expected, outputs)


def judged_runtime(subject: Subject, baseline: Baseline, simulated: Generated, pool: Pool) -> JudgedRuntime:
    """Compare the images of the candidate's own library with those of our reading, and time it beside torch."""
    if subject.runtime is None:
        return JudgedRuntime(reason=subject.no_runtime)
    if subject.schedule is not None:
        return JudgedRuntime(reason="its precise steps are simulated")
    if not baseline.judge.runtimes:
        return JudgedRuntime(reason="judge.runtimes is false")
    if not baseline.together:
        return JudgedRuntime(reason="memory does not hold it beside the full-precision model")
    found = JudgedRuntime(name=subject.runtime.name)
    try:
        variant = baseline.variant(pool, LIBRARY, keys_of_others(subject))
        pipeline = pipeline_of(baseline.session.checkpoint, variant)
        images = generate(
            pipeline, baseline.prompts, sampling_of(baseline.infer), f"{subject.name} by {subject.runtime.name}"
        ).images
        found["agreement"] = cast(ImageScores, summary(score_pairs(psnr, simulated.images, images)))
        engines = {FRAMEWORK: pool[baseline.denoiser], QUANTIZED: pool[LIBRARY]}
        if len({engine.device.type for engine in engines.values()}) > 1:  # times of different devices are not compared
            return found
        rounds = denoiser_rounds(baseline.session.checkpoint, engines, baseline.infer, baseline.timing)
    except Exception as error:  # other people's code, which may fail in any way; our reading stands without it
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


def judged_entry(
    subject: Subject,
    baseline: Baseline,
    rows: Sequence[Mapping[str, Any]],
    network_error: float | None,
    runtime: JudgedRuntime,
) -> Judged:
    hurting = [row for row in rows if row["output_error"] is not None]
    hurting.sort(key=lambda row: (-(row["network_error"] or 0), -row["output_error"]))
    return Judged(
        name=subject.name,
        path=shown(subject.path),
        reader=subject.reader,
        maker=subject.maker,
        loras=subject.loras,
        schedule=subject.schedule,
        bits=8 * subject.stored_bytes / baseline.session.parameters[baseline.denoiser],
        stored_bytes=subject.stored_bytes,
        formats=dict(Counter(row["format"] for row in rows)),
        inputs=dict(Counter(row["inputs"] for row in rows)),
        network_error=network_error,
        hurting=[cast(Hurting, {name: row[name] for name in get_type_hints(Hurting)}) for row in hurting[:HURTING]],
        parts={
            part: JudgedPart(
                reader=other.reader,
                maker=other.maker,
                bits=other.bits,
                stored_bytes=other.stored_bytes,
                formats=dict(Counter(row["format"] for row in other.rows)),
            )
            for part, other in subject.others.items()
        },
        text=baseline.text if subject.cuts_text else None,
        runtime=runtime,
    )


def record_of(
    baseline: Baseline, comparison: VariantOutputs, judged: Judged, facts: dict, step: StageTimer, mark: str
) -> Record:
    """The candidate's record, without what only a run has."""
    high = judged["formats"].get(HIGH_PRECISION, 0)
    groups = ("model", "infer", "judge", "timing", "metrics")
    full, theirs = comparison.images[FRAMEWORK], comparison.images[QUANTIZED]
    shared = shared_entries(baseline.session, baseline.infer, baseline.metrics, facts, step, full, theirs)
    return cast(Record, shared | {
        "fingerprint": mark,
        "overrides": [],
        "knobs": {group: dataclasses.asdict(getattr(baseline, group)) for group in groups},
        "simulated": False,
        "simulated_because": None,
        "sizes_bytes": {},
        "plans": {},
        "latency": {},
        "layers": {"quantized": sum(judged["formats"].values()) - high, "high_precision": high},
        "judged": judged,
    })  # fmt: skip
