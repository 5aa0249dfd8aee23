"""Rounding of inputs, by hand."""

import pytest
import torch

from sd_quant.interchange.comfyui_marks import INT8, Mxfp8
from sd_quant.interchange.diffusers_bitsandbytes import OutlierColumns
from sd_quant.interchange.inputs import (
    Affine,
    BlockInteger,
    Columns,
    Multiplied,
    Nvfp4,
    Rotated,
    StaticFloat8,
    smoothed,
)
from sd_quant.numbers import relative_error
from sd_quant.quantization.rotation import rotated

pytestmark = pytest.mark.commit


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


ZEROS = [Nvfp4(None, 0.0), Nvfp4(0.5, 0.0), Mxfp8(), Rotated(INT8, 4), StaticFloat8(0.1), OutlierColumns(2.0)]


@pytest.mark.parametrize("inputs", ZEROS, ids=str)
def test_inputs_of_zeros_stay_zeros(inputs):
    """comfy-kitchen's NVFP4 divides them by a scale of 0."""
    assert torch.equal(inputs(torch.zeros(2, 3, 32)), torch.zeros(2, 3, 32))


def test_rows_of_rotated_inputs_are_rotated_back():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = Rotated(INT8, 16)(x)
    torch.testing.assert_close(rotated(found, 16), INT8(rotated(x, 16)))
    assert relative_error(x, found) < 0.02 and not torch.equal(found, INT8(x))


def test_blocks_of_64_are_rounded_to_seven_steps_each_way():
    x = torch.zeros(1, 128)
    x[0, :3], x[0, 64] = torch.tensor([7.0, -2.6, 0.4]), -0.7
    expected = torch.zeros(1, 128)
    expected[0, :2], expected[0, 64] = torch.tensor([7.0, -3.0]), -0.7
    torch.testing.assert_close(BlockInteger()(x), expected)


def test_an_offset_makes_codes_unsigned_and_is_taken_back():
    """0..15 of what is shifted: the number below minus the offset becomes the lowest code."""
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([14.0, 2.4, -1.5])
    found = BlockInteger(torch.ones(64))(x)
    torch.testing.assert_close(found[0, :4], torch.tensor([14.0, 2.0, -1.0, 0.0]))
    assert str(BlockInteger(torch.ones(64))) == "uint4, a scale for 64 numbers"


def test_columns_are_rounded_apart_and_only_multiplication_is_smoothing():
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    inputs = Columns((BlockInteger(), INT8), (64, 64))
    assert torch.equal(inputs(x), torch.cat([BlockInteger()(x[:, :64]), INT8(x[:, 64:])], 1))
    factor = torch.rand(128) + 0.5
    assert torch.equal(smoothed(Multiplied(factor, False, inputs), x), x * factor)
    assert torch.equal(smoothed(inputs, x), x)
