"""The measurement of one candidate (third-party checkpoint or run) against the full-precision model."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_type_hints

from sd_quant.files import write_json
from sd_quant.inference.loading import pipeline_of
from sd_quant.metrics.memory import StageTimer
from sd_quant.places import shown
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.record import Hurting, Judged, JudgedPart, JudgedRuntime, Record, write_record
from sd_quant.report.summary import PROVENANCE
from sd_quant.report.table import write_csv
from sd_quant.stages import judged_figures
from sd_quant.stages.baseline import Baseline
from sd_quant.stages.compare import save_pairs
from sd_quant.stages.generate import generate, keep_prompts, sampling_of
from sd_quant.stages.results import shared_entries
from sd_quant.stages.shared import VariantOutputs
from sd_quant.stages.third_party import Subject
from sd_quant.stages.variants import FRAMEWORK, QUANTIZED

HURTING = 10  # layers with the largest errors that a record names


def judge_one(subject: Subject, baseline: Baseline, reference: VariantOutputs, mark: str, folder: Path) -> None:
    """Measure one candidate; write images, ``layers.csv`` and last the record (fingerprint: ``mark``) to ``folder``."""
    step, keys = StageTimer(), judged_figures.keys_of(subject)
    opened = {key: subject.parts[part].open for part, key in keys.items()}
    if subject.runtime is not None:
        opened[judged_figures.LIBRARY] = subject.runtime.open
    pool = baseline.engines(opened)
    try:
        with step("images"):
            theirs = pipeline_of(baseline.session.checkpoint, baseline.variant(pool, keys))
            generated = generate(theirs, baseline.prompts, sampling_of(baseline.infer), subject.name)
            comparison = VariantOutputs(reference.images | {QUANTIZED: generated})
            save_pairs(comparison, baseline.prompts, subject.name, folder)
        with step("layers"):
            outputs = judged_figures.network_outputs(pool[judged_figures.THEIRS], reference, baseline)
            rows, network_error = judged_figures.layer_rows(subject, baseline, reference, pool, outputs)
            write_csv(rows_with_others(rows, subject), folder / "layers.csv")
        with step("runtime"):
            runtime = judged_figures.judged_runtime(subject, baseline, generated, pool)
    finally:
        pool.close()
    facts = baseline.facts | {"inputs": baseline.facts["inputs"] | {"candidate": subject.file}}
    judged = judged_entry(subject, baseline, rows, network_error, runtime)
    keep_prompts(baseline.infer, folder)
    write_json(folder / PROVENANCE, facts)
    write_record(record_of(baseline, comparison, judged, facts, step, mark), folder)


def rows_with_others(rows: list[dict[str, Any]], subject: Subject) -> list[dict[str, Any]]:
    """Append the other quantized parts' rows of ``layers.csv`` to the denoiser's ``rows``."""
    others = [
        row | {"weight_error": errors.get(row["name"])}
        for other in subject.others.values()
        for errors in [other.weight_errors()]
        for row in other.rows
    ]
    return [*rows, *others]


def judged_entry(
    subject: Subject,
    baseline: Baseline,
    rows: Sequence[Mapping[str, Any]],
    network_error: float | None,
    runtime: JudgedRuntime,
) -> Judged:
    hurting = [row for row in rows if row["output_error"] is not None]
    hurting.sort(key=lambda row: (-(row["network_error"] or 0), -row["output_error"]))
    parts = {
        part: JudgedPart(
            reader=own.reader,
            maker=own.maker,
            bits=own.bits,
            stored_bytes=own.stored_bytes,
            formats=dict(Counter(row["format"] for row in own.rows)),
        )
        for part, own in subject.parts.items()
    }
    denoiser = parts.pop(next(iter(parts)))
    return Judged(
        name=subject.name,
        path=shown(subject.path),
        reader=denoiser["reader"],
        maker=denoiser["maker"],
        loras=subject.loras,
        bits=8 * denoiser["stored_bytes"] / baseline.session.parameters[baseline.denoiser],
        stored_bytes=denoiser["stored_bytes"],
        formats=denoiser["formats"],
        inputs=dict(Counter(row["inputs"] for row in rows)),
        network_error=network_error,
        hurting=[cast(Hurting, {name: row[name] for name in get_type_hints(Hurting)}) for row in hurting[:HURTING]],
        parts=parts,
        runtime=runtime,
    )


def record_of(
    baseline: Baseline, comparison: VariantOutputs, judged: Judged, facts: dict, step: StageTimer, mark: str
) -> Record:
    """Return the candidate's record, with fingerprint ``mark``; entries that only a run has are empty or absent."""
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
