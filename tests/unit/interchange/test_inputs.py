"""Rounding of inputs, by hand."""

import pytest
import torch

from sd_quant.interchange.comfyui_marks import INT8
from sd_quant.interchange.inputs import Affine, Rotated
from sd_quant.numbers import relative_error
from sd_quant.quantization.rotation import rotated


@pytest.mark.parametrize(
    "inputs, rows, expected",
    [
        (INT8, [[127.0, 3.4, -1.0], [0.127, 0.0014, 0.0], [0.0, 0.0, 0.0]],
         [[127.0, 3.0, -1.0], [0.127, 0.001, 0.0], [0.0, 0.0, 0.0]]),
        # half of the 255 steps between torchao's 256 codes, so that the largest is cut off where it is positive
        (Affine(), [[127.5, 3.4], [-255.0, 3.4]], [[127.0, 3.0], [-256.0, 4.0]]),
    ],
    ids=["comfyui", "torchao"],
)  # fmt: skip
def test_each_row_has_its_own_scale(inputs, rows, expected):
    torch.testing.assert_close(inputs(torch.tensor(rows)), torch.tensor(expected))


def test_rows_of_rotated_inputs_are_rotated_back():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = Rotated(INT8, 16)(x)
    torch.testing.assert_close(rotated(found, 16), INT8(rotated(x, 16)))
    assert relative_error(x, found) < 0.02 and not torch.equal(found, INT8(x))
