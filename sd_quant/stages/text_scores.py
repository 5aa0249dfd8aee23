"""Scores of a run's images that the knobs ``metrics`` ask for, and MLPerf's verdict on two of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sd_quant.config import Infer, Metrics
from sd_quant.inference.loading import pipeline_of
from sd_quant.metrics import NOT_ASKED, Against, named_scores
from sd_quant.metrics.images import Images
from sd_quant.metrics.intervals import Interval, paired_interval
from sd_quant.metrics.mlperf import captions_sha256, git_blob, mlperf_window
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.places import input_path
from sd_quant.stages.generate import sampling_of


def text_scores(
    metrics: Metrics, infer: Infer, checkpoint: Checkpoint, prompts: list[str], variants: Mapping[str, Images]
) -> dict:
    """The record's text scores of each variant's images, or the reason why there are none.

    ``variants`` has images by variant, one for each of the ``prompts``, full precision's first. Each of the others has
    its ``difference`` from that with an interval at 95 %, prompt by prompt, for every score that has ``values``.
    """
    asked = {
        knob: [input_path(given)] if isinstance(given, str) else [] for knob, given in asdict(metrics).items() if given
    }
    if not asked:
        return {"value": None, "reason": "no weights were named in metrics"}
    made, reference = how_made(infer, checkpoint, prompts), next(iter(variants.values()))
    found = {name: scores_of(reference, images, prompts, asked, made) for name, images in variants.items()}
    first, *others = found
    for variant in others:
        for key, entry in found[variant].items():
            if values := entry.get("values"):
                interval = paired_interval(values, found[first][key]["values"], prompts)
                entry["difference"] = None if interval is None else described(interval)
    return found


def described(interval: Interval) -> dict[str, float | None]:
    """An interval for the record; ends that are infinite, as of a single prompt, are None."""
    return dict(zip(("mean", "low", "high"), (interval.value, *interval.ends), strict=True))


def how_made(infer: Infer, checkpoint: Checkpoint, prompts: list[str]) -> dict:
    """The conditions under which the images were made, by the names of ``mlperf.PROTOCOL``."""
    sampler = pipeline_of(checkpoint, {}).own_sampler
    deciding = {name: sampler.config.get(name) for name in ("timestep_spacing", "steps_offset")}
    return {
        "prompts": captions_sha256(prompts), "scheduler": {"class": type(sampler).__name__, **deciding},
        "steps": infer.steps,
        "guidance_scale": infer.scale, "height": infer.height, "width": infer.width,
        "negative_prompt": infer.negative_prompt, "latents": sampling_of(infer).described()["latents"],
    }  # fmt: skip


def scores_of(
    reference: Images, images: Images, prompts: list[str], asked: Mapping[str, Sequence[Path]], made: Mapping
) -> dict[str, dict]:
    """Each score of one variant's images, with the reason where nobody asked for it, and MLPerf's verdict.

    ``reference`` are full precision's images, which some scores compare them with; ``asked`` has the knobs of
    ``metrics`` that are given, each with its file or without one.
    """
    given = {
        Against.PROMPTS: [images, prompts], Against.REFERENCE: [images, list(reference)], Against.PHOTOGRAPHS: [images]
    }  # fmt: skip
    entries: dict[str, dict] = {}
    for score in named_scores():
        if score.knob not in asked:
            entries[score.key] = {"value": None, "reason": NOT_ASKED}
            continue
        entries[score.key] = score.compute(*given[score.against], *asked[score.knob])
    clip, fid = entries["clip_score"], entries["fid"]
    judged = {
        "clip_network": clip.get("network"),
        "fid_network": fid.get("network"),
        "fid_references": git_blob(*asked["fid_references"]) if "fid_references" in asked else None,
    }
    return {**entries, "mlperf": mlperf_window(clip["value"], fid["value"], {**made, **judged})}
