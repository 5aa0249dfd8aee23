"""Degenerate images: black, of one colour, saturated, or the same whatever the prompt.

A mean over images hides a broken one, so each image is compared with full precision's image of the same prompt, which
may ask for a black image. The limits are far from images of the shipped checkpoints in full precision, in INT8 and with
half of the steps (simple things on 64 x 64 pixels; comments give the extreme of 150). Alternative not taken: a
network's quality score, because CLIP prefers a black frame to some healthy images. PSNR finds images of noise.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

from sd_quant.metrics.images import Images

DARK, DARK_REFERENCE = 8, 16  # levels that 995 of 1,000 values do not exceed; healthy 255
FLAT, FLAT_REFERENCE = 2, 4  # standard deviation over the pixels, of the liveliest channel; healthy 17 and more
CLIPPED, MORE_CLIPPED = 0.5, 0.25  # share of values at 0 or 255, and beyond the reference's; healthy 0.5, 0.04 beyond
SAME, SAME_REFERENCE = 4, 16  # root mean square of a difference: 36 dB, as INT8 from its reference, and 24; healthy 28
TILES = (8, 8)  # mean colours by which images are compared first: they never differ by more than the images do


def degenerate(reference: Images, images: Images) -> list[dict]:
    """Return ``{index, reason}`` of each degenerate image, uint8 [N, H, W, 3]; ``reference`` has full precision's.

    A reason completes the sentence "image 3 is ...".
    """
    found = []
    tiles = tiles_of(images)
    for index, (expected, image) in enumerate(zip(reference, images, strict=True)):
        reason = next((words for words, holds in KINDS.items() if holds(expected, image)), None)
        if reason := reason or as_another(index, tiles, reference, images):
            found.append({"index": index, "reason": reason})
    return found


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], bool]] = {  # the first that holds is the reason
    "black, which is what NaN becomes": lambda reference, image: (
        brightest(image) <= DARK and brightest(reference) > DARK_REFERENCE
    ),
    "of one colour": lambda reference, image: liveliest(image) <= FLAT and liveliest(reference) > FLAT_REFERENCE,
    "saturated": lambda reference, image: clipped(image) >= max(CLIPPED, clipped(reference) + MORE_CLIPPED),
}


def brightest(image: np.ndarray) -> float:
    return float(np.percentile(image, 99.5))


def liveliest(image: np.ndarray) -> float:
    return float(image.std(axis=(0, 1)).max())


def clipped(image: np.ndarray) -> float:
    return float(((image == 0) | (image == 255)).mean())


def tiles_of(images: Images) -> np.ndarray:
    """Return the mean colours of each image's tiles, float32 [N, tiles x 3]."""
    small = [np.asarray(Image.fromarray(image).resize(TILES, Image.Resampling.BOX)) for image in images]
    return np.stack(small).reshape(len(small), -1).astype(np.float32)


def as_another(index: int, tiles: np.ndarray, reference: Images, images: Images) -> str | None:
    """Return, in words, another image that nearly equals image ``index`` although their references differ, or None."""
    near = np.sqrt(np.square(tiles - tiles[index]).mean(axis=1)) <= SAME + 1  # tiles are rounded
    for other in np.flatnonzero(near):
        if other == index or images[other].shape != images[index].shape:
            continue
        if apart(images[other], images[index]) <= SAME and apart(reference[other], reference[index]) > SAME_REFERENCE:
            return f"nearly the same as image {other}, from which full precision's differs"
    return None


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.square(a.astype(np.float32) - b).mean()))
