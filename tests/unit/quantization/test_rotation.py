"""Rotated inputs: the matrix by its definition; for layers of them see test_inputs_as_they_come.py."""

import math

import pytest
import torch

from sd_quant.quantization.recipe import ROTATIONS
from sd_quant.quantization.rotation import rotation_matrix

pytestmark = pytest.mark.commit

GROUPS = [group for group in ROTATIONS if group]


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_a_regular_hadamard_matrix_that_fp16_holds(group):
    """Numbers of one magnitude, orthogonal and symmetric; all rows have the sum 1, of Sylvester's the first has all.

    So a mean stays what it is, which channels behind an activation function have, and becomes no outlier.
    """
    matrix = rotation_matrix(group)
    assert (matrix.dtype, matrix.shape) == (torch.float32, (group, group))
    assert torch.equal(matrix.abs(), torch.full((group, group), 1 / math.sqrt(group)))
    assert torch.equal(matrix @ matrix, torch.eye(group)) and torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.sum(0), torch.ones(group))
    assert torch.equal(matrix.half().float(), matrix)
