"""The record of a run, put together from the results of its steps."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import onnx

from sd_quant.config import PRECISE, QuantizeJob, artifact
from sd_quant.engines.tensorrt.plan import PlanReport
from sd_quant.files import write_json
from sd_quant.metrics.embeddings import moved
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.parts import Part
from sd_quant.places import output_path
from sd_quant.quantization.assignment import WITHOUT_WEIGHTS, LayerAssignment
from sd_quant.quantization.statistics import Peak
from sd_quant.report.record import (
    HandedOver,
    Layers,
    Levers,
    Moved,
    QuantizedPart,
    Record,
    Sizes,
    explained,
    write_record,
)
from sd_quant.report.summary import PROVENANCE
from sd_quant.stages.choose import Chosen
from sd_quant.stages.job_folder import check_still_there
from sd_quant.stages.results import shared_entries
from sd_quant.stages.shared import VariantOutputs
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants
from sd_quant.trackers import track

TRACKED = "outputs/trackers"


@dataclass(frozen=True)
class Results:
    """The results of the steps of a run."""

    variants: Variants
    chosen: Chosen
    peaks: Mapping[str, Peak]  # of calibration, by part
    plans: dict[str, PlanReport]  # by part
    comparison: VariantOutputs
    latency: dict
    parity: dict
    executed: dict  # the numeric types in which quantized layers multiply
    handed_over: dict[str, HandedOver]  # by target
    levers: Levers | None  # settings other than quantization that save time


def written_record(job: QuantizeJob, results: Results, step: StageTimer, fingerprint: str) -> Record:
    """Write the run's record and facts; log to experiment trackers. Raises SdQuantError if the folder was removed."""
    directory = results.variants.directory
    check_still_there(directory)
    record = record_of(job, results, step, fingerprint)
    write_json(directory / PROVENANCE, results.variants.shared.facts)
    write_record(record, directory)
    track(job.trackers, record, directory, output_path(TRACKED))
    return record


def record_of(job: QuantizeJob, results: Results, step: StageTimer, fingerprint: str) -> Record:
    knobs, variants, facts = dataclasses.asdict(job), results.variants, results.variants.shared.facts
    loaded, directory, calls = variants.loaded, variants.directory, results.comparison.of_an_image
    framework, unquantized, quantized = (
        results.comparison.images[variant] for variant in (FRAMEWORK, FULL_PRECISION, QUANTIZED)
    )
    of_denoisers = {(part, name): row for part in loaded.denoisers for name, row in variants.assignments[part].items()}
    others = [part for part in variants.assignments if part != loaded.denoiser]
    shared = shared_entries(
        loaded, job.infer, job.metrics, facts, step, framework, quantized, calls.by_denoiser if calls else {}
    )
    by_engine = fidelity(framework.images, unquantized.images, framework.latents, unquantized.latents)
    return cast(Record, shared | {
        "fingerprint": fingerprint,
        "overrides": facts["overrides"],
        "knobs": knobs["quantize"] | {group: knobs[group] for group in ("model", "trt", "infer", "timing", "verdict")},
        "simulated": variants.simulated is not None,
        "simulated_because": variants.simulated,
        "sizes_bytes": sizes(loaded.parts, loaded.parameters, directory),
        "plans": {part: dataclasses.asdict(report) for part, report in results.plans.items()},
        "latency": results.latency,
        "fidelity_unquantized_engine": by_engine,
        "parity": results.parity,
        "executed": results.executed,
        "layers": count_layers(of_denoisers),
        "parts": {
            part: part_entry(results, part, preset)
            for part, preset in (loaded.part_presets or dict.fromkeys(others, "fit")).items()
        },
        "peaks": {part: dataclasses.asdict(peak) for part, peak in results.peaks.items()},
        "smoothing": count_smoothing(variants.assignment, artifact(directory, "onnx", loaded.denoiser)),
        "sensitivity": sensitivity_entry(results.chosen),
        "hand_over": results.handed_over,
        "judged": None,
        "levers": results.levers,
    })  # fmt: skip


def part_entry(results: Results, part: str, preset: str) -> QuantizedPart:
    """Return the record's entry for a quantized part other than the denoiser: preset, layers, change of outputs."""
    full, quantized = (results.comparison.outputs[variant][part] for variant in (FRAMEWORK, QUANTIZED))
    outputs = {name: cast(Moved, moved(output, quantized[name])) for name, output in full.items()}
    return {"preset": preset, "layers": count_layers(results.variants.assignments[part]), "outputs": outputs}


def sensitivity_entry(chosen: Chosen) -> dict[str, Any]:
    """Return the record's ``sensitivity``: the measurements by which presets were chosen."""
    if chosen.fitted:
        return {"limit": chosen.fitted.entry()}
    return {"limit": None, "reason": "assignment decides" if chosen.given else "there is no budget or fit"}


def sizes(parts: Mapping[str, Part], parameters: dict[str, int], directory: Path) -> dict[str, Sizes]:
    """Return the bytes of each part's files, and of its weights in fp32."""
    by_part: dict[str, Sizes] = {}
    for part, count in parameters.items():
        weights = 4 * count
        if because := parts[part].refused:
            none = explained(None, f"not exported: {because}")
            by_part[part] = Sizes(onnx_full_precision=none, onnx_quantized=none, plan=none, weights_fp32=weights)
            continue
        path = artifact(directory, "onnx", part)
        plans = [plan for suffix in ("", PRECISE) if (plan := artifact(directory, "plan", part, suffix)).exists()]
        full = artifact(directory / "full_precision", "onnx", part)
        stored = bytes_of(path)
        by_part[part] = {
            "onnx_full_precision": bytes_of(full) if full.exists() else stored,
            "onnx_quantized": explained(stored if full.exists() else None, "not quantized"),
            "plan": explained(sum(plan.stat().st_size for plan in plans) or None, "no plan was asked for"),
            "weights_fp32": weights,
        }
    return by_part


def bytes_of(onnx_path: Path) -> int:
    """Return the bytes of an ONNX file and of the files beside it, which hold its weights."""
    return sum(file.stat().st_size for file in onnx_path.parent.iterdir())


def count_layers(assignment: Mapping[Any, LayerAssignment]) -> Layers:
    """Count the convolutions and linears that are quantized, and those that are not."""
    layers = [layer for layer in assignment.values() if layer.role not in WITHOUT_WEIGHTS]
    quantized = sum(layer.format is not None for layer in layers)
    return {"quantized": quantized, "high_precision": len(layers) - quantized}


def count_smoothing(assignment: Mapping[str, LayerAssignment], onnx_path: Path) -> dict[str, int]:
    """Count smoothed layers, folded layers, and the exported graph's smoothing multiplications (0 without a graph)."""
    nodes = onnx.load(onnx_path, load_external_data=False).graph.node if onnx_path.exists() else ()
    return {
        "smoothed_layers": sum(
            layer.pre_quant_scale is not None and bool(layer.format) for layer in assignment.values()
        ),
        "folded_layers": sum(layer.folded_into is not None and bool(layer.format) for layer in assignment.values()),
        "multiplications": sum(node.output[0].endswith(".smoothed") for node in nodes),
    }
