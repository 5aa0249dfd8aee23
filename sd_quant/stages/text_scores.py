"""CLIP score, FID and read words of a run's images, if they are asked for, and MLPerf's verdict on the first two."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from sd_quant.config import Infer, Metrics
from sd_quant.inference.loading import sampler_of
from sd_quant.metrics import SCORES, Against
from sd_quant.metrics.images import Images
from sd_quant.metrics.mlperf import captions_sha256, git_blob, mlperf_window
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.places import input_path
from sd_quant.stages.generate import sampling_of


def text_scores(
    metrics: Metrics, infer: Infer, checkpoint: Checkpoint, prompts: list[str], variants: Mapping[str, Images]
) -> dict:
    """The record's text scores of each variant's images, or the reason why there are none.

    ``variants`` has images by variant, one for each of the ``prompts``; of one size where files are named, which the
    knobs ensure.
    """
    files = {name: input_path(path) for name, path in asdict(metrics).items() if isinstance(path, str)}
    switched = {name for name, on in asdict(metrics).items() if on is True}
    if not files and not switched:
        return {"value": None, "reason": "no weights were named in metrics"}
    made = how_made(infer, checkpoint, prompts)
    return {variant: scores_of(images, prompts, files, made, switched) for variant, images in variants.items()}


def how_made(infer: Infer, checkpoint: Checkpoint, prompts: list[str]) -> dict:
    """The conditions under which the images were made, by the names of ``mlperf.PROTOCOL``."""
    return {
        "prompts": captions_sha256(prompts), "scheduler": sampler_of(checkpoint), "steps": infer.steps,
        "guidance_scale": infer.scale, "height": infer.height, "width": infer.width,
        "negative_prompt": infer.negative_prompt, "latents": sampling_of(infer).described()["latents"],
    }  # fmt: skip


def scores_of(
    images: Images, prompts: list[str], files: Mapping[str, Path], made: Mapping, switched: Collection[str] = ()
) -> dict:
    """Each score of one variant's images, with the reason where its ``files`` are not named, and MLPerf's verdict.

    ``switched`` are the knobs of ``metrics`` that are true.
    """
    entries: dict = {}
    for score in SCORES.values():
        if score.against in (Against.PROMPTS, Against.PHOTOGRAPHS):
            if score.files and not files.keys() >= set(score.files):
                entries[score.key] = {"value": None, "reason": "its files were not named in metrics"}
                continue
            if score.switch and score.switch not in switched:
                entries[score.key] = {"value": None, "reason": f"metrics.{score.switch} is false"}
                continue
            compared_with = [prompts] if score.against is Against.PROMPTS else []
            named = [files[name] for name in score.files] + [files.get(name) for name in score.optional_files]
            entries[score.key] = score.compute(images, *compared_with, *named)
    clip, fid = entries["clip_score"], entries["fid"]
    judged = {
        "clip_network": clip.get("network"),
        "fid_network": fid.get("network"),
        "fid_references": git_blob(files["fid_references"]) if "fid_references" in files else None,
    }
    return {**entries, "mlperf": mlperf_window(clip["value"], fid["value"], {**made, **judged})}
