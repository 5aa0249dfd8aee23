"""Images that are broken in a way that needs no score, beside healthy ones."""

import numpy as np
import pytest

from sd_quant.metrics.degenerate import degenerate

pytestmark = pytest.mark.commit


def scenes(number: int, seed: int = 0) -> np.ndarray:
    """Images with a disc of one colour on a ground of another, a third of it white."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:64, :64]
    found = np.empty((number, 64, 64, 3), np.uint8)
    for image in found:
        image[:] = generator.integers(30, 225, 3)
        image[np.hypot(x - generator.integers(16, 48), y - 32) < 14] = generator.integers(0, 255, 3)
        image[:20] = 255
    return found


REFERENCE = scenes(4)
HEALTHY = (REFERENCE + np.random.default_rng(1).normal(0, 4, REFERENCE.shape)).clip(0, 255).astype(np.uint8)  # 36 dB


def with_third(image: np.ndarray) -> np.ndarray:
    images = HEALTHY.copy()
    images[2] = image
    return images


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (np.zeros((64, 64, 3), np.uint8), "black"),
        (np.random.default_rng(2).integers(0, 7, (64, 64, 3), np.uint8), "black"),
        (np.full((64, 64, 3), (90, 120, 40), np.uint8), "of one colour"),
        ((HEALTHY[2] > 127).astype(np.uint8) * 255, "saturated"),
        (HEALTHY[0], "nearly the same as image 0"),
    ],
)
def test_a_degenerate_image_is_named_with_its_reason(image, reason):
    found = {each["index"]: each["reason"] for each in degenerate(REFERENCE, with_third(image))}
    assert found.pop(2).startswith(reason)
    assert found == ({0: "nearly the same as image 2, from which full precision's differs"} if "same" in reason else {})


@pytest.mark.parametrize("images", [HEALTHY, list(HEALTHY), [*HEALTHY[:3], HEALTHY[3][:32]]])
def test_healthy_images_are_none(images):
    references = REFERENCE if isinstance(images, np.ndarray) else [*REFERENCE[:3], REFERENCE[3][: len(images[3])]]
    assert degenerate(references, images) == []


@pytest.mark.parametrize("value", [0, 255, 90])
def test_what_full_precision_makes_alike_is_no_fault(value):
    """Two prompts for a sheet of one colour: dark, saturated, flat and equal, in both."""
    reference = REFERENCE.copy()
    reference[1:3] = value
    assert degenerate(reference, reference.clip(3, 252)) == [] == degenerate(reference, reference)
