"""Hessians of all rows, against torch's own products and convolutions."""

import pytest
import torch
from torch import nn

from sd_quant.models.parts import SharedInput
from sd_quant.quantization import hessians
from sd_quant.quantization.hessians import Hessians, add_rows, blocks_of, diagonal_blocks, hessians_of, rows_of
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from tests.layers import drawn, turned

from ..calibration.some_statistics import CONVOLUTIONS

pytestmark = pytest.mark.commit

LINEAR = nn.Linear(160, 1)


def summed(layer: nn.Module, width: int, block: int, *inputs: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(blocks_of(width, block))
    for step, x in enumerate(inputs):
        add_rows(found, layer, x, step)
    return found


@pytest.mark.parametrize("block", [64, 128, 160, 4096])
def test_it_is_the_diagonal_of_the_product_of_all_rows(block, monkeypatch):
    monkeypatch.setattr(hessians, "ROWS_AT_ONCE", 7)
    inputs = drawn(4, 9, 160), drawn(3, 160, seed=1)
    rows = torch.cat([x.flatten(0, -2) for x in inputs]).double()
    whole, found = rows.T @ rows, summed(LINEAR, 160, block, *inputs)
    for index, blocks in enumerate(diagonal_blocks(found, 160, None, 0)):
        part = slice(index * block, (index + 1) * block)
        torch.testing.assert_close(blocks.double(), whole[part, part], rtol=1e-5, atol=1e-4)
    assert found.dtype == torch.float32 and len(found) == -(-160 // block)
    # what fp16 cannot hold is cut, and fp16 is summed in fp32
    assert summed(nn.Linear(1, 1), 1, 64, torch.tensor([[1e30], [-1e30]])).item() == 2 * torch.tensor(65504.0) ** 2
    assert summed(nn.Linear(1, 1), 1, 64, torch.full((4, 1), 60000.0).half()).item() == 4 * 60000.0**2


@pytest.mark.parametrize("most", [7, 1024])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_rows_of_a_convolution_are_what_its_outputs_multiply(options, most, monkeypatch):
    """Of every k-th output, where there are more than the most; as many steps as k have each of them once."""
    monkeypatch.setattr(hessians, "MOST_POSITIONS", most)
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 5, **options), torch.randn(2, 3, 9, 7)
    output = conv(x).movedim(1, -1).flatten(1, 2)  # [samples, positions, 5]
    every = -(-output.shape[1] // most)
    steps = [rows_of(conv, x, step) for step in range(every)]
    assert all(len(rows) <= 2 * most for rows in steps) and (every > 1) == (most == 7)
    for step, rows in enumerate(steps):
        products = rows @ conv.weight.flatten(1).T + conv.bias
        torch.testing.assert_close(products, output[:, step::every].flatten(0, 1))
    assert torch.equal(rows_of(conv, x, every), steps[0])


@pytest.mark.parametrize("factors", [None, drawn(160, seed=5).exp()], ids=["plain", "smoothed"])
@pytest.mark.parametrize("rotation", [0, 4, 16])
def test_it_becomes_that_of_smoothed_and_rotated_inputs(factors, rotation):
    x = drawn(500, 160)
    rows = turned(x if factors is None else x * factors, rotation)
    for index, block in enumerate(diagonal_blocks(summed(LINEAR, 160, 64, x), 160, factors, rotation)):
        part = rows[:, 64 * index : 64 * (index + 1)]
        torch.testing.assert_close(block.double(), part.T @ part, rtol=1e-4, atol=1e-2)
    assert index == 2 and block.shape == (32, 32)


def recipe(conv: str = "int4", linear: str = "int4", **given) -> Recipe:
    enable = Enable(Pair(conv, None), Pair(linear, None), None)
    return Recipe(**{"quant_level": 1.0, "alpha": None, "enable": enable, "rounding": "gptq", "hessian": 256} | given)


ROLES = {"conv": "conv", "to_q": "qkv", "to_k": "qkv", "ff": "ffn", "time": "excluded", "out": "linear"}
INPUTS = [SharedInput(("to_q", "to_k", "time")), SharedInput(("ff",)), SharedInput(("time",))]


def test_those_are_summed_whose_codes_gptq_may_choose_at_any_level():
    linears = (("to_q", "to_k"), ("ff",))
    assert hessians_of(ROLES, INPUTS, recipe()) == Hessians(256, (*linears, ("conv",), ("out",)))
    assert hessians_of(ROLES, INPUTS, recipe(conv="int8")) == Hessians(256, (*linears, ("out",)))
    for none in ({"hessian": 0}, {"rounding": "nearest"}, {"conv": "int8", "linear": "int8"}):
        assert not hessians_of(ROLES, INPUTS, recipe(**none)).readers
