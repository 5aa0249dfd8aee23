"""Every score of images is computed where TF32 cannot round it."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sd_quant.metrics import fidelity, lpips


@pytest.mark.parametrize("module, name", [(fidelity, "psnr"), (fidelity, "ssim"), (lpips, "lpips")])
def test_scores_are_computed_in_full_precision(monkeypatch, module, name):
    entered = []

    @contextmanager
    def full_precision():
        entered.append(name)
        yield torch.device("cpu")

    monkeypatch.setattr(module, "full_precision", full_precision)
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    assert len(getattr(module, name)(images, 255 - images)) == 2
    assert entered == [name]
