"""Images of a run: one array where all images have one size, otherwise a list of arrays."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sd_quant.errors import ArtifactError

Images = np.ndarray | list[np.ndarray]  # uint8 [N, H, W, 3]; of several sizes N of [H, W, 3]


def joined(images: Sequence[np.ndarray]) -> Images:
    """Stack images [H, W, 3] to one array; return a list where their sizes differ."""
    return np.stack(images) if len({image.shape for image in images}) == 1 else list(images)


def arrays(images: Images) -> Iterable[np.ndarray]:
    """Return the images as arrays [N, H, W, 3], each of one image size."""
    return [images] if isinstance(images, np.ndarray) else (image[None] for image in images)


def shapes_of(images: Any) -> list:
    """Return the shape of an array or tensor, or of each in a list, for an error message."""
    return [list(each.shape) for each in images] if isinstance(images, list) else list(images.shape)


def is_rgb(images: np.ndarray) -> bool:
    """Return whether the images are uint8 [N, H, W, 3]."""
    return images.dtype == np.uint8 and images.ndim == 4 and images.shape[-1] == 3


def check_rgb(images: Images) -> None:
    """Raise ArtifactError unless the images are uint8 [N, H, W, 3]."""
    for each in arrays(images):
        if not is_rgb(each):
            raise ArtifactError(
                f"{each.dtype} images of shape {list(each.shape)} were given, expected uint8 [N, H, W, 3]; convert "
                "them first"
            )


def check_pairs(reference: np.ndarray, images: np.ndarray, smallest: int = 1) -> None:
    """Raise ArtifactError unless both are uint8 [N, H, W, 3] of one shape, with H and W of at least ``smallest``."""
    same = (reference.shape, reference.dtype) == (images.shape, images.dtype)
    if not same or not is_rgb(images) or min(images.shape[1:3]) < smallest:
        raise ArtifactError(
            f"{images.dtype} images of shape {list(images.shape)} were compared with {reference.dtype} "
            f"{list(reference.shape)}, expected the same uint8 [N, H, W, 3] twice with H and W of at least {smallest}; "
            "run both with the same prompts and size"
        )


def score_pairs(
    score: Callable[[np.ndarray, np.ndarray], list[float | None]], reference: Images, images: Images
) -> list[float | None]:
    """Return the ``score`` of each pair of images; images of different sizes are passed to it one pair at a time."""
    if isinstance(reference, np.ndarray) and isinstance(images, np.ndarray):
        return score(reference, images)
    return [value for pair in zip(arrays(list(reference)), arrays(list(images)), strict=True) for value in score(*pair)]
