"""Distances of embeddings, by hand."""

import pytest
import torch

from sd_quant.metrics.embeddings import moved

pytestmark = pytest.mark.commit


def test_the_first_token_is_apart_and_zeros_that_pad_a_text_do_not_count():
    full = torch.zeros(2, 4, 2)
    full[:, 0], full[:, 1:3] = torch.tensor([100.0, 0.0]), torch.tensor([1.0, 0.0])
    quantized = full.clone()
    quantized[0, 0], quantized[0, 1] = torch.tensor([100.0, 100.0]), torch.tensor([3.0, 4.0])
    found = moved(full, quantized)
    assert found["first_token"] == pytest.approx((2**-0.5 + 1) / 2)
    assert (found["cosine"], found["worst"]) == (pytest.approx((0.6 + 3) / 4), pytest.approx(0.6))


def test_one_vector_for_a_text_has_no_first_token_and_pixels_have_no_cosine():
    found = moved(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 1.0]]).half())
    assert (found["cosine"], found["worst"]) == (pytest.approx(0.5), 0.0) and "first_token" not in found
    assert moved(torch.ones(1, 3, 2, 2), torch.full((1, 3, 2, 2), 1.5)) == {"relative_error": pytest.approx(0.5)}
