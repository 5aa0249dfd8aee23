"""CLIP score and FID of a run's pictures, where the user has named the networks' weights, and MLPerf's verdict."""

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from sd_quant.config import Infer, Metrics, anchored
from sd_quant.metrics.text_image import clip_score, fid, mlperf_window


def text_scores(metrics: Metrics, infer: Infer, prompts: list[str], pictures: Mapping[str, np.ndarray]) -> dict:
    """CLIP score and FID of both sides, as far as their weights were named, and whether MLPerf would accept them."""
    files = {name: anchored(path) for name, path in asdict(metrics).items() if path is not None}
    if not files:
        return {"value": None, "reason": "no weights were named in metrics"}
    not_named: dict = {"value": None, "reason": "its weights were not named in metrics"}
    found: dict = {}
    for side, images in pictures.items():
        clip = clip_score(images, prompts, files["clip_weights"]) if "clip_weights" in files else not_named
        distance = fid(images, files["fid_references"], files["fid_weights"]) if "fid_weights" in files else not_named
        protocol = {
            "prompts": prompts, "scheduler": "EulerDiscreteScheduler", "steps": infer.steps,
            "guidance_scale": infer.scale, "height": infer.height, "width": infer.width,
            "clip_network": clip.get("network"), "fid_references": distance.get("references"),
        }  # fmt: skip
        accepted = mlperf_window(clip["value"], distance["value"], protocol)
        found[side] = {"clip_score": clip, "fid": distance, "mlperf": accepted}
    return found
