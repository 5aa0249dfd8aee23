"""The Fréchet distance of two sets of images, by the moments of their features.

Both sets of features are modelled as Gaussians, whose distance has a closed form (Dowson & Landau, J. Multivariate
Analysis 12, 1982; for images Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017):

    ||mean - mean'||^2 + tr(C + C' - 2 (C^1/2 C' C^1/2)^1/2)
"""

import torch
from torch import Tensor


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D], float64, of at least two rows of features [N, D] of any float type."""
    features = features.double()
    return features.mean(0), features.T.cov()


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float | None:
    """The formula above for means [D] and covariances [D, D], all float64; None when any of them is not finite.

    Covariances may be singular: symmetric roots by eigenvalues always exist. The road not taken is the square root of
    the product C C', as in the code of Heusel et al., which is not symmetric and comes out complex, or not at all,
    where a covariance is singular, as with fewer images than features.
    """
    if not all(part.isfinite().all() for part in (mean, covariance, other_mean, other_covariance)):
        return None
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * _positive(values).sqrt() @ vectors.T
    common = _positive(torch.linalg.eigvalsh(root @ other_covariance @ root)).sqrt().sum()
    distance = (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * common
    return max(0.0, distance.item())  # rounding puts equal sets a little below


def _positive(eigenvalues: Tensor) -> Tensor:
    """The eigenvalues, with zero for those below the rounding error, whose square roots would be far larger."""
    floor = eigenvalues.max() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return eigenvalues.where(eigenvalues > floor, 0.0)
