"""The record of a run, put together from the results of its steps."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import onnx
from torch import Tensor

from sd_quant.config import PRECISE, Infer, Metrics, QuantizeJob, artifact
from sd_quant.config.comparison import RUNTIME
from sd_quant.engines.tensorrt.plan import PlanReport
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics import NAMED, SCORES, Against
from sd_quant.metrics.categories import by_category
from sd_quant.metrics.degenerate import degenerate
from sd_quant.metrics.embeddings import moved
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.memory import StageTimer, peak_cuda_memory_bytes
from sd_quant.metrics.video import video_scores
from sd_quant.models.checkpoint import samples_per_image
from sd_quant.models.parts import Part
from sd_quant.quantization.assignment import WITHOUT_WEIGHTS, LayerAssignment
from sd_quant.quantization.statistics import Peak
from sd_quant.report.record import (
    DONE,
    SCHEMA_VERSION,
    HandedOver,
    Layers,
    Levers,
    Moved,
    QuantizedPart,
    Record,
    Sizes,
    at,
    explained,
)
from sd_quant.stages.choose import Chosen
from sd_quant.stages.compare import VariantOutputs
from sd_quant.stages.load import Loaded
from sd_quant.stages.session import Session
from sd_quant.stages.text_scores import text_scores
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED

Latents = Tensor | list[Tensor]  # [N, steps, ...], or N of [steps, ...]


@dataclass(frozen=True)
class Results:
    """The results of the steps of a run."""

    loaded: Loaded
    chosen: Chosen
    peaks: Mapping[str, Peak]  # of calibration, by part
    plans: dict[str, PlanReport]  # by part
    comparison: VariantOutputs
    simulated: str | None  # why the quantized variant is the simulation and no engine; None where it is an engine
    latency: dict
    parity: dict
    executed: dict  # in which numbers the quantized layers are multiplied
    handed_over: dict[str, HandedOver]  # by target
    memory: dict  # by part
    levers: Levers | None  # beside bits
    noise_floor: dict  # by way


def shared_entries(
    session: Session, infer: Infer, metrics: Metrics, facts: dict, step: StageTimer, full: Generated,
    quantized: Generated, calls: Mapping[str, int] = {},
) -> dict[str, Any]:  # fmt: skip
    """The entries that the record of a run and that of a judged checkpoint share.

    ``full`` and ``quantized`` are the images of both, ``facts`` what the job started from, ``step`` its stages,
    ``calls`` those of each of several denoisers in an image.
    """
    prompts, categories = infer.prompt_list(), infer.categories()
    scores = fidelity(full.images, quantized.images, *same_steps(full.latents, quantized.latents))
    made = {FULL_PRECISION: full.images, QUANTIZED: quantized.images}
    texts = text_scores(metrics, infer, session.checkpoint, prompts, made)
    of_images = [score.key for score in SCORES.values() if score.against is Against.IMAGES]
    values = {key: (scores[key]["values"], None) for key in of_images} | values_against_prompts(texts)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": DONE,
        "denoiser": {
            "part": session.denoiser,
            "samples_per_image": samples_per_image(session.checkpoint, infer.scale),
            "calls": dict(calls) or None,
        },
        "prompts": prompts,
        "categories": categories,
        "by_category": by_category(prompts, categories, values),
        "peak_memory_bytes": step.peak,
        "peak_cuda_memory_bytes": explained(peak_cuda_memory_bytes(), "no NVIDIA GPU"),
        "seconds": step.seconds,
        "stages": step.stages,
        "environment": {"versions": facts["versions"], "machine": facts["machine"]},
        "inputs": facts["inputs"],
        "fidelity": scores,
        "text_scores": texts,
        "degenerate": degenerate(full.images, quantized.images),
        "video": video_scores(full.images, quantized.images, infer.width) if session.checkpoint.family.MOVES else None,
    }


def values_against_prompts(scores: Mapping[str, Any]) -> dict[str, tuple[list, list]]:
    """The values of each image and of full precision's, of the text scores that have some, by their keys."""
    pairs = {key: [at(scores, variant, key, "values") for variant in (QUANTIZED, FULL_PRECISION)] for key in NAMED}
    return {key: (own, full) for key, (own, full) in pairs.items() if own and full}


def same_steps(full: Latents, quantized: Latents) -> tuple[Latents, Latents]:
    """Latents of as many steps: of all, or of the last where the numbers of steps differ."""
    if full[0].shape == quantized[0].shape:
        return full, quantized
    return [each[-1:] for each in full], [each[-1:] for each in quantized]


def record_of(
    job: QuantizeJob, fingerprint: str, facts: dict, results: Results, step: StageTimer, directory: Path
) -> Record:
    """The record of a job whose files are in ``directory``; ``facts`` are those that it started from."""
    knobs, loaded, assignment = dataclasses.asdict(job), results.loaded, results.chosen.assignment
    framework, unquantized, quantized = (
        results.comparison.images[variant] for variant in (FRAMEWORK, FULL_PRECISION, QUANTIZED)
    )
    chosen = {loaded.denoiser: assignment} | results.chosen.parts
    of_denoisers = {(part, name): row for part in loaded.denoisers for name, row in chosen[part].items()}
    calls = results.comparison.of_an_image
    shared = shared_entries(
        loaded, job.infer, job.metrics, facts, step, framework, quantized, calls.by_denoiser if calls else {}
    )
    by_engine = fidelity(framework.images, unquantized.images, framework.latents, unquantized.latents)
    return cast(Record, shared | {
        "fingerprint": fingerprint,
        "overrides": facts["overrides"],
        "knobs": knobs["quantize"] | {group: knobs[group] for group in ("model", "trt", "infer", "timing", "verdict")},
        "simulated": results.simulated is not None,
        "simulated_because": results.simulated,
        "sizes_bytes": sizes(loaded.parts, loaded.parameters, directory),
        "plans": {part: dataclasses.asdict(report) for part, report in results.plans.items()},
        "latency": results.latency,
        "fidelity_unquantized_engine": by_engine,
        "noise_floor": {
            way: entry or by_engine if way == RUNTIME else entry for way, entry in results.noise_floor.items()
        },
        "parity": results.parity,
        "executed": results.executed,
        "layers": count_layers(of_denoisers),
        "parts": {
            part: part_entry(results, part, preset)
            for part, preset in (loaded.part_presets or dict.fromkeys(results.chosen.parts, "fit")).items()
        },
        "memory": results.memory,
        "peaks": {part: dataclasses.asdict(peak) for part, peak in results.peaks.items()},
        "smoothing": count_smoothing(assignment, artifact(directory, "onnx", loaded.denoiser)),
        "sensitivity": sensitivity_entry(results.chosen),
        "auto": results.chosen.auto,
        "hand_over": results.handed_over,
        "judged": None,
        "levers": results.levers,
    })  # fmt: skip


def part_entry(results: Results, part: str, preset: str) -> QuantizedPart:
    """The record's entry for another quantized part than the denoiser."""
    full, quantized = (results.comparison.outputs[variant][part] for variant in (FRAMEWORK, QUANTIZED))
    outputs = {name: cast(Moved, moved(output, quantized[name])) for name, output in full.items()}
    return {"preset": preset, "layers": count_layers(results.chosen.parts[part]), "outputs": outputs}


def sensitivity_entry(chosen: Chosen) -> dict[str, Any]:
    """The record's ``sensitivity``: the measurements by which layers were chosen."""
    if chosen.sensitivity:
        return {"curve": chosen.sensitivity.curve}
    if chosen.fitted:
        return {"curve": None, "reason": "a limit chose the presets", "limit": chosen.fitted.entry()}
    return {"curve": None, "reason": "assignment decides" if chosen.given else "keep is 0"}


def sizes(parts: Mapping[str, Part], parameters: dict[str, int], directory: Path) -> dict[str, Sizes]:
    """Bytes of each part's files, and of its weights in fp32."""
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
    """Bytes of an ONNX file and of the files beside it, which hold its weights."""
    return sum(file.stat().st_size for file in onnx_path.parent.iterdir())


def count_layers(assignment: Mapping[Any, LayerAssignment]) -> Layers:
    """The number of convolutions and linears that are quantized, and of those that are not."""
    layers = [layer for layer in assignment.values() if layer.role not in WITHOUT_WEIGHTS]
    quantized = sum(layer.format is not None for layer in layers)
    return {"quantized": quantized, "high_precision": len(layers) - quantized}


def count_smoothing(assignment: dict[str, LayerAssignment], onnx_path: Path) -> dict[str, int]:
    """The number of smoothed layers, and of the multiplications that the exported graph has for them.

    Where there is none, the simulation multiplies in front of each layer that is not folded.
    """
    nodes = onnx.load(onnx_path, load_external_data=False).graph.node if onnx_path.exists() else ()
    return {
        "smoothed_layers": sum(
            layer.pre_quant_scale is not None and bool(layer.format) for layer in assignment.values()
        ),
        "folded_layers": sum(layer.folded_into is not None and bool(layer.format) for layer in assignment.values()),
        "multiplications": sum(node.output[0].endswith(".smoothed") for node in nodes),
    }
