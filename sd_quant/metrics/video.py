"""Compare a video with full precision's: PSNR of single frames, and flicker between neighbouring frames.

A change between neighbouring frames that full precision does not have is seen as flicker; an error that is equal in all
frames is not. So the error of the differences of neighbouring frames is measured, too. Alternatives not taken: optical
flow, which needs a network, and scores of whole videos (FVD), which need thousands of videos.
"""

from collections.abc import Sequence

import numpy as np

from sd_quant.metrics.fidelity import psnr, summary
from sd_quant.metrics.images import Images, check_pairs
from sd_quant.metrics.intervals import mean_interval


def video_scores(reference: Images, videos: Images, width: int) -> dict:
    """Build the record's ``video`` for N videos, uint8 [N, H, frames * width, 3], whose frames are side by side.

    With d the difference of neighbouring frames, ``flicker`` is the root mean square of d - d(full precision), in
    levels from 0 to 255, and ``change`` is mean(|d|) / mean(|d(full precision)|).
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
    """Return the mean over videos with its 95 % interval; without values, None with the ``reason``."""
    if not values:
        return {"mean": None, "interval": [None, None], "values": [], "reason": reason}
    interval = mean_interval(values)
    return {"mean": interval.value, "interval": list(interval.ends), "values": list(values), "reason": None}
