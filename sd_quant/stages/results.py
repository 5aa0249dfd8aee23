"""Record entries common to runs and judged checkpoints: image scores, text scores and facts of the job.

If the MLPerf add-on is installed, the text scores also get its verdict (whether MLPerf's accuracy limits are met).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from sd_quant.addons import at_work, loaded, points
from sd_quant.config import Infer, Metrics
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics import NAMED, NOT_ASKED, Against, scoring
from sd_quant.metrics.degenerate import degenerate
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.images import Images
from sd_quant.metrics.intervals import Interval, paired_interval
from sd_quant.metrics.memory import StageTimer, peak_cuda_memory_bytes
from sd_quant.metrics.video import video_scores
from sd_quant.models.checkpoint import Checkpoint, samples_per_image
from sd_quant.places import input_path
from sd_quant.report.record import DONE, SCHEMA_VERSION, explained
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.session import Session
from sd_quant.stages.variants import FULL_PRECISION, QUANTIZED

Latents = Tensor | list[Tensor]  # [images, steps, ...], or a list of [steps, ...] by image


def shared_entries(
    session: Session, infer: Infer, metrics: Metrics, facts: dict, step: StageTimer, full: Generated,
    quantized: Generated, calls: Mapping[str, int] = {},
) -> dict[str, Any]:  # fmt: skip
    """Return the record entries that runs and judged checkpoints share.

    ``full`` and ``quantized``: images; ``facts``: versions, machine, inputs; ``calls``: an image's, by denoiser.
    """
    prompts = infer.prompt_list()
    scores = fidelity(full.images, quantized.images, *same_steps(full.latents, quantized.latents))
    made = {FULL_PRECISION: full.images, QUANTIZED: quantized.images}
    texts = text_scores(metrics, infer, session.checkpoint, prompts, made)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": DONE,
        "denoiser": {
            "part": session.denoiser,
            "samples_per_image": samples_per_image(session.checkpoint, infer.scale),
            "calls": dict(calls) or None,
        },
        "prompts": prompts,
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


def same_steps(full: Latents, quantized: Latents) -> tuple[Latents, Latents]:
    """Return the latents of all steps or, if the numbers of steps differ, of the last step only."""
    if full[0].shape == quantized[0].shape:
        return full, quantized
    return [each[-1:] for each in full], [each[-1:] for each in quantized]


def text_scores(
    metrics: Metrics, infer: Infer, checkpoint: Checkpoint, prompts: list[str], variants: Mapping[str, Images]
) -> dict:
    """Compute the text scores of each variant's images (full precision first), or a reason if none was asked for.

    Variants after the first also get the ``difference`` from full precision, paired by prompt, with a 95 % interval.
    """
    asked = {
        knob: [input_path(given)] if isinstance(given, str) else [] for knob, given in asdict(metrics).items() if given
    }
    if not asked:
        return {"value": None, "reason": "no weights were named in metrics"}
    reference = next(iter(variants.values()))
    found = {name: scores_of(reference, images, prompts, asked) for name, images in variants.items()}
    if points("scores", "mlperf"):
        references = next(iter(asked.get(NAMED["fid"], ())), None)
        made = how_made(infer, checkpoint) | {"prompts": prompts, "fid_references": references}
        for entries in found.values():
            entries["mlperf"] = verdict(entries, made)
    first, *others = found
    for variant in others:
        for key, entry in found[variant].items():
            if (values := entry.get("values")) and (reference_values := found[first][key].get("values")):
                interval = paired_interval(values, reference_values, prompts)
                entry["difference"] = None if interval is None else described(interval)
    return found


def described(interval: Interval) -> dict[str, float | None]:
    """Convert an interval for the record; infinite ends (from a single prompt) become None."""
    return dict(zip(("mean", "low", "high"), (interval.value, *interval.ends), strict=True))


def how_made(infer: Infer, checkpoint: Checkpoint) -> dict:
    """Return the conditions under which the images were made: scheduler, steps, guidance, size, noise."""
    sampler = pipeline_of(checkpoint, {}).own_sampler
    deciding = {name: sampler.config.get(name) for name in ("timestep_spacing", "steps_offset")}
    return {
        "scheduler": {"class": type(sampler).__name__, **deciding}, "steps": infer.steps,
        "guidance_scale": infer.scale, "height": infer.height, "width": infer.width,
        "negative_prompt": infer.negative_prompt, "latents": sampling_of(infer).described()["latents"],
    }  # fmt: skip


def scores_of(
    reference: Images, images: Images, prompts: list[str], asked: Mapping[str, Sequence[Path]]
) -> dict[str, dict]:
    """Compute each score of one variant's images; give a reason for a score not asked for, or that failed.

    ``asked``: the settings in ``metrics`` that are given, each with a list of its file (empty if it has none).
    """
    given = {
        Against.PROMPTS: [images, prompts], Against.REFERENCE: [images, list(reference)], Against.PHOTOGRAPHS: [images]
    }  # fmt: skip
    entries: dict[str, dict] = {}
    for key, knob in NAMED.items():
        if knob not in asked:
            entries[key] = {"value": None, "reason": NOT_ASKED}
            continue
        try:
            with scoring(key) as score:
                entries[key] = score.compute(*given[score.against], *asked[knob])
        except SdQuantError as error:
            entries[key] = {"value": None, "reason": str(error)}
    return entries


def verdict(entries: Mapping[str, Mapping], made: Mapping) -> dict:
    """Return MLPerf's verdict ``{passes, reason}`` on one variant's scores; ``made``: from ``how_made``."""
    try:
        with at_work("scores"):
            return loaded("scores", "mlperf", "MLPerf's verdict")(entries, made)
    except SdQuantError as error:
        return {"passes": None, "reason": str(error)}
