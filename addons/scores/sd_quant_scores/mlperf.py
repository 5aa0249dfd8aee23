"""MLPerf's accepted intervals of CLIP score and FID, and the protocol by which images have to be made for them.

MLPerf Inference up to v5.1, stable-diffusion-xl, closed division (github.com/mlcommons/inference, ``text_to_image``)
accepts scores within 0.2 % and 2 % of the fp32 reference's 31.74981837 and 23.48046692 (docs/index.md there).
Its images are made by backend_pytorch.py and scored by coco.py, with CLIP from open_clip and Inception from
pytorch-fid.

Weights and definitions of both scores are those of ``sd_quant.metrics.text_image``. Two differences from MLPerf: images
are resized for Inception as in Heusel et al., half a pixel off from pytorch-fid's, and CLIP is recognized by the size
of its network, not by its weights. So images that pass here still have to pass MLPerf's own scripts.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_quant.files import read_regular

CLIP = (31.68631873, 31.81331801)
FID = (23.01085758, 23.95007626)
PROTOCOL = {
    "prompts": "635b5177356209894f672f272f62632d67099a015e483bb19e8af97d5050fa34",  # see captions_sha256
    "scheduler": {"class": "EulerDiscreteScheduler", "timestep_spacing": "leading", "steps_offset": 1},
    "steps": 20,
    "guidance_scale": 8.0,
    "height": 1024,
    "width": 1024,
    "negative_prompt": "normal quality, low quality, worst quality, low res, blurry, nsfw, nude",
    "latents": "ea2c5d770d8921c79b43fade2dcecab9c95baae0500f5a2bc860ceb45faeccb1",  # see inference.latents.digest_of
    "clip_network": {"layers": 12, "width": 768, "patch": 32},  # openai/clip-vit-base-patch32
    "fid_network": "inception-2015-12-05",
    "fid_references": "806479d0693a33110526b6689aa26baddd995c7b",  # see git_blob
}
NAMES_OF_DIGESTS = {  # the names of what PROTOCOL has by digest; all in text_to_image
    "prompts": "the 5000 captions of captions_source.tsv",
    "latents": "the one noise of tools/latents.pt",
    "fid_references": "tools/val2014.npz",
}


def verdict(entries: Mapping[str, Mapping], made: Mapping[str, Any]) -> dict:
    """Return ``{passes, reason}`` of ``entries``, the scores of images; ``made`` says how, by the names of PROTOCOL."""
    clip, fid, references = entries["clip_score"], entries["fid"], made["fid_references"]
    judged = {
        "prompts": captions_sha256(made["prompts"]),
        "clip_network": clip.get("network"),
        "fid_network": fid.get("network"),
        "fid_references": None if references is None else git_blob(references),
    }
    return mlperf_window(clip["value"], fid["value"], {**made, **judged})


def mlperf_window(clip_score: float | None, fid: float | None, made: Mapping[str, Any]) -> dict:
    """Return ``{passes, reason}``: whether both scores are accepted; None if ``made`` differs or a score is missing."""
    differing = [
        f"{name} {'are' if name.endswith('s') else 'is'} not {NAMES_OF_DIGESTS[name]}"
        if name in NAMES_OF_DIGESTS
        else f"{name} is {made.get(name)!r} instead of {expected!r}"
        for name, expected in PROTOCOL.items()
        if made.get(name) != expected
    ]
    if differing:
        return {"passes": None, "reason": f"not MLPerf's protocol: {'; '.join(differing)}"}
    if clip_score is None or fid is None:
        missing = " and no ".join(name for name, value in (("CLIP score", clip_score), ("FID", fid)) if value is None)
        return {"passes": None, "reason": f"there is no {missing}"}
    outside = [
        f"{name} {value:.5f} is not within {low:.5f} and {high:.5f}"
        for name, value, (low, high) in (("CLIP score", clip_score, CLIP), ("FID", fid, FID))
        if not low <= value <= high
    ]
    return {"passes": not outside, "reason": "; ".join(outside) or None}


def captions_sha256(prompts: Sequence[str]) -> str:
    """Compute the SHA-256 of the sorted prompts in UTF-8, joined by line feeds; their order does not matter."""
    return hashlib.sha256("\n".join(sorted(prompts)).encode()).hexdigest()


def git_blob(path: Path) -> str | None:
    """Compute git's blob hash (SHA-1) of a file, which identifies it in MLPerf's repository; None for a folder."""
    if not path.is_file():
        return None
    content = read_regular(path, math.inf)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
