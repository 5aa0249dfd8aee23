"""Fidelity: the distance of the quantized pipeline's images from full precision's, on the same prompts and seeds.

Full precision is the reference that quantization should not change. So pixel distances (PSNR, SSIM) apply, which say
little about generated images otherwise; LPIPS is nearer to what people notice. The signal-to-quantization-noise ratio
of the latents shows at which step images diverge. Alternative not taken: FID, which needs thousands of images. A value
that is infinite or undefined is None, with a reason.
"""

import math
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from sd_quant.devices import full_precision
from sd_quant.errors import ArtifactError
from sd_quant.metrics import IDENTICAL, Against, scores_against
from sd_quant.metrics.images import Images, check_pairs, score_pairs, shapes_of
from sd_quant.numbers import finite

SSIM_SIGMA = 1.5  # Wang et al. 2004: an 11 x 11 Gaussian window, at 64 x 64 pixels as at 1024 x 1024
SSIM_WINDOW = 11
NOT_FINITE = "NaN or infinite latents"


def psnr(reference: np.ndarray, image: np.ndarray) -> list[float | None]:
    """Return the PSNR in dB of each image; both arguments uint8 [N, H, W, 3]. None for identical images.

    Raises ArtifactError when shapes or types differ.
    """
    with full_precision() as device:
        scores = [
            peak_signal_noise_ratio(_pixels(x, device), _pixels(ref, device), data_range=255.0).item()
            for ref, x in _pairs(reference, image)
        ]
    return [finite(score) for score in scores]


def ssim(reference: np.ndarray, image: np.ndarray) -> list[float]:
    """Return the structural similarity of each image, 1.0 for identical images; both uint8 [N, H, W, 3] with H, W >= 6.

    Raises ArtifactError when shapes or types differ. Source: Wang et al., IEEE TIP 13(4), 2004.
    """
    with full_precision() as device:
        return [
            structural_similarity_index_measure(
                _pixels(x, device), _pixels(ref, device), sigma=SSIM_SIGMA, kernel_size=SSIM_WINDOW, data_range=255.0
            ).item()
            for ref, x in _pairs(reference, image)
        ]


def latent_sqnr(
    reference: torch.Tensor | list[torch.Tensor], latents: torch.Tensor | list[torch.Tensor]
) -> list[float | None]:
    """Return each step's SQNR in dB: 10 log10(sum ref^2 / sum (ref - x)^2), averaged over images.

    Both arguments are [N, steps, ...], or N of [steps, ...] where sizes differ, of any float type. Infinite ratios are
    left out of the mean. A step is None if no image has a finite ratio, or if one of its latents is NaN or infinite.
    Raises ArtifactError when the shapes differ.
    """
    shapes, expected = ([list(each.shape) for each in side] for side in (latents, reference))
    if shapes != expected or not expected or min(map(len, expected)) < 2:
        raise ArtifactError(
            f"latents of shape {shapes_of(latents)} were compared with a reference of {shapes_of(reference)}, "
            "expected the same [N, steps, ...] twice; run both with the same prompts, steps and size"
        )
    signal = torch.stack([_energy(ref.double()) for ref in reference])
    noise = torch.stack([_energy(ref.double() - x.double()) for ref, x in zip(reference, latents, strict=True)])
    return [_mean_ratio(*step) for step in zip(signal.unbind(1), noise.unbind(1), strict=True)]


def summary(values: Sequence[float | None], reason: str = IDENTICAL, lower_is_better: bool = False) -> dict:
    """Return ``{mean, min, worst_index, values, reason}`` of images' scores; ``max``, not ``min``, if lower is better.

    Mean and extreme ignore None; the result's ``reason`` says how many values are None and why.
    """
    present = [(value, index) for index, value in enumerate(values) if value is not None]
    extreme, name = (max, "max") if lower_is_better else (min, "min")
    worst, worst_index = extreme(present, default=(None, None), key=itemgetter(0))
    missing = len(values) - len(present)
    return {
        "mean": math.fsum(value for value, _ in present) / len(present) if present else None,
        name: worst,
        "worst_index": worst_index,
        "values": list(values),
        "reason": f"{missing} of {len(values)} images: {reason}" if missing else None,
    }


def image_scores(reference: Images, images: Images) -> dict:
    """Compute all scores of single images against a ``reference`` of the same prompts and seeds, by the score's key."""
    return {
        score.key: summary(score_pairs(score.compute, reference, images), score.undefined, not score.more_is_better)
        for score in scores_against(Against.IMAGES)
    }


def fidelity(
    reference_images: Images,
    images: Images,
    reference_latents: torch.Tensor | list[torch.Tensor],
    latents: torch.Tensor | list[torch.Tensor],
) -> dict:
    """Build the record's ``fidelity``: all scores by key, on the same prompts and seeds; images have H, W >= 64."""
    entries = image_scores(reference_images, images)
    for score in scores_against(Against.LATENTS):
        values = entries[score.key] = score.compute(reference_latents, latents)
        broken = not all(torch.isfinite(each).all() for each in (*reference_latents, *latents))
        reason = NOT_FINITE if broken else score.undefined
        entries[score.reason_key] = reason if None in values else None
    return entries


def _pairs(reference: np.ndarray, image: np.ndarray) -> zip:
    """Return the pairs of reference and image one at a time: SSIM takes 0.8 GB for a pair of 1024 x 1024."""
    check_pairs(reference, image)
    return zip(reference, image, strict=True)


def _pixels(image: np.ndarray, device: torch.device) -> torch.Tensor:
    """Convert an image [H, W, 3] uint8 to a tensor [1, 3, H, W] float32.

    Float64 takes 35 s and 5 GB instead of 1 s for SSIM at 1024 x 1024. Float32 errs by at most 0.0004, on flat images.
    """
    return torch.tensor(image, dtype=torch.float32, device=device).permute(2, 0, 1).unsqueeze(0)


def _energy(latents: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of an image's latents after each step: [steps, ...] -> [steps]."""
    return latents.square().flatten(1).sum(1)


def _mean_ratio(signal: torch.Tensor, noise: torch.Tensor) -> float | None:
    """Return the mean of 10 log10(signal / noise) over images; None under the conditions of ``latent_sqnr``."""
    if not (torch.isfinite(signal).all() and torch.isfinite(noise).all()):
        return None
    ratios = 10 * torch.log10(signal / noise)
    return finite(ratios[torch.isfinite(ratios)].mean().item())
