"""Flicker of a known size is found, and only flicker."""

import numpy as np
import pytest

from sd_quant.errors import ArtifactError
from sd_quant.metrics.video import video_scores

pytestmark = pytest.mark.commit
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


def test_what_has_no_change_has_a_reason():
    still = np.full((1, 8, WIDTH, 3), 9, np.uint8)
    alone = video_scores(still, still, WIDTH)
    assert alone["flicker"]["reason"] == "a single frame" and alone["flicker"]["interval"] == [None, None]
    frozen = np.full((1, 8, 2 * WIDTH, 3), 9, np.uint8)
    assert "no frame of full precision" in video_scores(frozen, frozen, WIDTH)["change"]["reason"]
    with pytest.raises(ArtifactError, match="were compared with"):
        video_scores(still, still[:, :4], WIDTH)
