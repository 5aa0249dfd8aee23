"""Scores of a run's images that the knobs ``metrics`` ask for, and the add-on's verdict on two of them, MLPerf's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sd_quant.addons import at_work, loaded, points
from sd_quant.config import Infer, Metrics
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import pipeline_of
from sd_quant.metrics import NAMED, NOT_ASKED, Against, scoring
from sd_quant.metrics.images import Images
from sd_quant.metrics.intervals import Interval, paired_interval
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
    """An interval for the record; ends that are infinite, as of a single prompt, are None."""
    return dict(zip(("mean", "low", "high"), (interval.value, *interval.ends), strict=True))


def how_made(infer: Infer, checkpoint: Checkpoint) -> dict:
    """The conditions under which the images were made."""
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
    """Each score of one variant's images, with the reason where nobody asked for it or an add-on has failed.

    ``reference`` are full precision's images, which some scores compare them with; ``asked`` has the knobs of
    ``metrics`` that are given, each with its file or without one.
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
    """MLPerf's on one variant's scores: ``{passes, reason}``."""
    try:
        with at_work("scores"):
            return loaded("scores", "mlperf", "MLPerf's verdict")(entries, made)
    except SdQuantError as error:
        return {"passes": None, "reason": str(error)}
