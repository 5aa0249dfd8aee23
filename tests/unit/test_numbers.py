import math

import pytest
import torch

from sd_quant.errors import ArtifactError
from sd_quant.numbers import finite, relative_error

pytestmark = pytest.mark.commit


def test_relative_error():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, torch.tensor([3.0, 4.5])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), reference) is None
    assert relative_error(reference, torch.tensor([3.0, math.nan])) is None
    with pytest.raises(ArtifactError, match="expected one shape; give both the same inputs"):
        relative_error(reference, torch.ones(3))


def test_what_json_does_not_have_is_none():
    assert [finite(value) for value in (1.5, math.nan, math.inf, -math.inf)] == [1.5, None, None, None]
