"""Differences of videos' frames from full precision's, each alone and from one to the next.

A change between neighbouring frames that full precision does not have is seen as flicker; pixels that err alike in all
frames do not flicker. So the error of the difference of neighbours is measured beside the PSNR of frames. The roads not
taken are optical flow, which needs a network, and scores of whole videos (FVD), which need thousands.
"""

from collections.abc import Sequence

import numpy as np

from sd_quant.metrics.fidelity import psnr, summary
from sd_quant.metrics.images import Images, check_pairs
from sd_quant.metrics.intervals import mean_interval


def video_scores(reference: Images, videos: Images, width: int) -> dict:
    """The record's ``video``, of videos uint8 [N, H, frames * width, 3], whose frames stand side by side.

    ``flicker`` is the root mean square, in levels of 255, of the difference of neighbouring frames less full
    precision's; ``change`` is the mean magnitude of that difference as a share of full precision's.
    Raises ArtifactError when shapes or types differ.
    """
    of_frames, flicker, change = list[float | None](), list[float](), list[float]()
    for full, video in zip(reference, videos, strict=True):
        check_pairs(full[None], video[None])
        frames = [np.stack(np.split(each, each.shape[1] // width, axis=1)) for each in (full, video)]
        of_frames += psnr(*frames)
        expected, found = (np.diff(each.astype(np.float64), axis=0) for each in frames)
        if len(found):
            flicker.append(float(np.sqrt(np.mean((found - expected) ** 2))))
        if expected.any():
            change.append(float(np.abs(found).mean() / np.abs(expected).mean()))
    return {
        "frames": len(of_frames) // len(reference),
        "psnr": summary(of_frames),
        "flicker": with_interval(flicker, "a single frame"),
        "change": with_interval(change, "no frame of full precision differs from the one before"),
    }


def with_interval(values: Sequence[float], reason: str) -> dict:
    """The mean over videos with its 95 % interval, None where it is not known."""
    if not values:
        return {"mean": None, "interval": [None, None], "values": [], "reason": reason}
    interval = mean_interval(values)
    return {"mean": interval.value, "interval": list(interval.ends), "values": list(values), "reason": None}
