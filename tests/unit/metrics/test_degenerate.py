"""Images that are broken in a way that needs no score, beside healthy ones, and flicker of a known size."""

import numpy as np
import pytest

from sd_quant.errors import ArtifactError
from sd_quant.metrics.degenerate import degenerate
from sd_quant.metrics.video import video_scores

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


WIDTH, FRAMES = 8, 6


def videos(count: int = 3) -> np.ndarray:
    """[N, H, frames * width, 3] of moving frames in the middle of the range."""
    moving = np.random.default_rng(0).integers(80, 120, (count, 8, FRAMES, WIDTH, 3))
    return moving.reshape(count, 8, FRAMES * WIDTH, 3).astype(np.uint8)


def with_noise(of_frame) -> np.ndarray:
    """The videos with a number of levels added to each frame."""
    levels = np.repeat([of_frame(frame) for frame in range(FRAMES)], WIDTH)
    return (videos().astype(int) + levels[:, None]).astype(np.uint8)


@pytest.mark.parametrize("levels", [1, 5, 20])
def test_injected_flicker_is_found_in_levels(levels):
    """Frames that are lighter and darker in turn change by twice as much from one to the next."""
    found = video_scores(videos(), with_noise(lambda frame: levels * (-1) ** frame), WIDTH)
    assert found["flicker"]["mean"] == pytest.approx(2 * levels) and len(found["flicker"]["values"]) == 3
    assert found["psnr"]["mean"] == pytest.approx(20 * np.log10(255 / levels), abs=1e-3)
    assert (found["change"]["mean"] > 1.3) == (levels == 20) and found["frames"] == FRAMES


def test_what_errs_alike_in_all_frames_does_not_flicker():
    found = video_scores(videos(), with_noise(lambda frame: 9), WIDTH)
    assert found["flicker"]["mean"] == 0 and found["change"]["mean"] == 1 and found["psnr"]["mean"] < 30
    low, high = found["flicker"]["interval"]
    assert low == high == 0


def test_the_worst_frame_is_that_of_one_video():
    spoilt = videos()
    spoilt[1, :, 3 * WIDTH : 4 * WIDTH] += 100
    found = video_scores(videos(), spoilt, WIDTH)
    assert found["psnr"]["worst_index"] == FRAMES + 3 and found["psnr"]["min"] == pytest.approx(8.13, abs=0.01)
    assert found["psnr"]["values"].count(None) == 3 * FRAMES - 1 and "identical" in found["psnr"]["reason"]
    assert np.argmax(found["flicker"]["values"]) == 1
    # what has no change has a reason
    still = np.full((1, 8, WIDTH, 3), 9, np.uint8)
    alone = video_scores(still, still, WIDTH)
    assert alone["flicker"]["reason"] == "a single frame" and alone["flicker"]["interval"] == [None, None]
    frozen = np.full((1, 8, 2 * WIDTH, 3), 9, np.uint8)
    assert "no frame of full precision" in video_scores(frozen, frozen, WIDTH)["change"]["reason"]
    with pytest.raises(ArtifactError, match="were compared with"):
        video_scores(still, still[:, :4], WIDTH)
