import numpy as np
import pytest

from sd_quant.errors import ArtifactError
from sd_quant.metrics.fidelity import psnr, ssim
from sd_quant.metrics.lpips import lpips

pytestmark = pytest.mark.commit

GOOD = np.zeros((2, 64, 64, 3), np.uint8)


@pytest.mark.parametrize("score", [psnr, ssim, lpips])
@pytest.mark.parametrize("other", [GOOD[:1], GOOD.repeat(2, axis=2), GOOD.astype(np.float32)])
def test_images_that_do_not_match_are_refused(score, other):
    with pytest.raises(ArtifactError, match="expected the same uint8"):
        score(GOOD, other)


@pytest.mark.parametrize("score", [psnr, ssim, lpips])
@pytest.mark.parametrize("bad", [GOOD.astype(np.float32), GOOD.transpose(0, 3, 1, 2), GOOD[..., :1], GOOD[0]])
def test_what_is_no_batch_of_images_is_refused(score, bad):
    with pytest.raises(ArtifactError, match=r"expected the same uint8 \[N, H, W, 3\]"):
        score(bad, bad)


def test_people_judged_no_smaller_images_for_lpips():
    with pytest.raises(ArtifactError, match="H and W of at least 64"):
        lpips(GOOD[:, :, 1:], GOOD[:, :, 1:])
