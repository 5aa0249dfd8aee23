"""CLIP score and FID of a run's images, if their networks' weights are named, and MLPerf's verdict on both."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sd_quant.config import Infer, Metrics, anchored
from sd_quant.metrics import SCORES, Against
from sd_quant.metrics.text_image import mlperf_window


def text_scores(metrics: Metrics, infer: Infer, prompts: list[str], variants: Mapping[str, np.ndarray]) -> dict:
    """The record's text scores of each variant's images, or the reason why there are none.

    ``variants`` has images by variant, uint8 [N, H, W, 3], one for each of the ``prompts``.
    """
    files = {name: anchored(path) for name, path in asdict(metrics).items() if path is not None}
    if not files:
        return {"value": None, "reason": "no weights were named in metrics"}
    return {variant: scores_of(images, prompts, files, infer) for variant, images in variants.items()}


def scores_of(images: np.ndarray, prompts: list[str], files: Mapping[str, Path], infer: Infer) -> dict:
    """Each score of one variant's images, with the reason where its ``files`` are not named, and MLPerf's verdict."""
    entries: dict = {}
    for score in SCORES.values():
        if score.against in (Against.PROMPTS, Against.PHOTOGRAPHS):
            if score.files and not files.keys() >= set(score.files):
                entries[score.key] = {"value": None, "reason": "its weights were not named in metrics"}
                continue
            compared_with = [prompts] if score.against is Against.PROMPTS else []
            entries[score.key] = score.compute(images, *compared_with, *(files[name] for name in score.files))
    clip, fid = entries["clip_score"], entries["fid"]
    protocol = {
        "prompts": prompts, "scheduler": "EulerDiscreteScheduler", "steps": infer.steps,
        "guidance_scale": infer.scale, "height": infer.height, "width": infer.width,
        "clip_network": clip.get("network"), "fid_references": fid.get("references"),
    }  # fmt: skip
    return {**entries, "mlperf": mlperf_window(clip["value"], fid["value"], protocol)}
