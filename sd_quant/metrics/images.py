"""Images of a run: one array where all have one size, as scores and people take them, else a list of them."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

Images = np.ndarray | list[np.ndarray]  # uint8 [N, H, W, 3]; of several sizes N of [H, W, 3]


def joined(images: Sequence[np.ndarray]) -> Images:
    """Images [H, W, 3] as one array, or as they are where their sizes differ."""
    return np.stack(images) if len({image.shape for image in images}) == 1 else list(images)


def arrays(images: Images) -> Iterable[np.ndarray]:
    """The images as arrays [N, H, W, 3], of one size each."""
    return [images] if isinstance(images, np.ndarray) else (image[None] for image in images)


def shapes_of(images: Images) -> list:
    """The shape of all, or of each where their sizes differ, as a message shows it."""
    return list(images.shape) if isinstance(images, np.ndarray) else [list(image.shape) for image in images]


def score_pairs(
    score: Callable[[np.ndarray, np.ndarray], list[float | None]], reference: Images, images: Images
) -> list[float | None]:
    """What ``score``, which takes images of one size, says of each pair of images. Raises what it raises."""
    if isinstance(reference, np.ndarray) and isinstance(images, np.ndarray):
        return score(reference, images)
    return [value for pair in zip(arrays(list(reference)), arrays(list(images)), strict=True) for value in score(*pair)]
