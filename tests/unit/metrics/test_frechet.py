import pytest
import torch
from torchmetrics.image.fid import _compute_fid

from sd_quant.metrics.frechet import frechet_distance, moments

pytestmark = pytest.mark.commit


def features(number: int, width: int = 12, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=random)
    return torch.randn(number, width, generator=random) @ mixed + torch.randn(width, generator=random)


def test_it_is_what_torchmetrics_computes_where_that_can_be_computed():
    one, other = moments(features(400)), moments(features(300, seed=1))
    theirs = _compute_fid(*one, *other).item()
    assert frechet_distance(*one, *other) == pytest.approx(theirs, rel=1e-9)
    assert frechet_distance(*other, *one) == pytest.approx(theirs, rel=1e-9)


def test_it_is_right_with_fewer_images_than_features():
    """C^1/2 C'^1/2 has the singular values of the product of the centred features, so their sum is the common trace."""
    one, other = features(20, width=64).double(), features(30, width=64, seed=1).double()
    centred = [(each - each.mean(0)) / (len(each) - 1) ** 0.5 for each in (one, other)]
    common = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    traces = sum(each.square().sum() for each in centred)
    expected = (one.mean(0) - other.mean(0)).square().sum() + traces - 2 * common
    assert frechet_distance(*moments(one), *moments(other)) == pytest.approx(expected.item(), rel=1e-9)


def test_no_number_comes_from_nan():
    mean, covariance = moments(features(50))
    assert frechet_distance(mean, covariance, mean * torch.nan, covariance) is None
