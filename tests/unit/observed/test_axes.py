"""Sizes of axes as formulas: those of latents, tokens and batches are found, and others stay as they were observed."""

import pytest

from sd_quant.models.parts import Axis
from sd_quant.observed.observing import axis_of

pytestmark = pytest.mark.commit

RUNS = [  # base, another size, several images with guidance
    {"batch": 2, "width": 512, "height": 512}, {"batch": 2, "width": 576, "height": 640},
    {"batch": 10, "width": 512, "height": 512},
]  # fmt: skip
NEW = {"batch": 4, "width": 1024, "height": 768}
FORMULAS = {
    "the batch": (lambda batch, width, height: batch, "batch"),
    "images of a batch with guidance": (lambda batch, width, height: batch // 2, "batch"),
    "columns of latents": (lambda batch, width, height: width // 8, "width"),
    "rows of latents": (lambda batch, width, height: height // 8, "height"),
    "tokens": (lambda batch, width, height: width * height // 256, "width*height"),
    "all tokens of a batch": (lambda batch, width, height: batch * width * height // 256, "batch*width*height"),
    "all columns of a batch": (lambda batch, width, height: batch * width // 16, "batch*width"),
    "tokens behind a text": (lambda batch, width, height: width * height // 256 + 77, "width*height"),
    "columns and one more": (lambda batch, width, height: width // 8 + 1, "width"),
}


@pytest.mark.parametrize(("size", "of"), FORMULAS.values(), ids=FORMULAS)
def test_an_axis_has_its_formula_and_the_size_of_an_image_that_was_not_observed(size, of):
    axis = axis_of([size(**run) for run in RUNS], RUNS)
    assert axis.of == of
    assert axis.size(**NEW) == size(**NEW)
    assert [axis.size(**run) for run in RUNS] == [size(**run) for run in RUNS]


@pytest.mark.parametrize("sizes", [[64, 70, 71], [7, 13, 11], [64, 64, 64], [100, 90, 100]])
def test_an_axis_that_fits_no_formula_has_the_first_size_that_was_observed(sizes):
    assert axis_of(sizes, RUNS) == Axis("", 0, 1, sizes[0])
    assert axis_of(sizes, RUNS).size(**NEW) == sizes[0]


def test_one_run_says_nothing_of_what_an_axis_follows():
    assert axis_of([4096], RUNS[:1]) == Axis("", 0, 1, 4096)


def test_nothing_is_taken_away_from_a_size():
    """A text of fewer than no tokens is a chance, as is a fraction of one."""
    assert axis_of([size - 5 for size in (1024, 1440, 1024)], RUNS).of == ""
