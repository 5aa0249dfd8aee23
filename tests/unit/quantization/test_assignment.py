"""What codes of inputs that are scaled token by token stand for: the rule that torchao and ComfyUI compute."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sd_quant.candidates.comfyui_inputs import INT8
from sd_quant.quantization.assignment import SMALLEST_TOKEN, LayerAssignment, token_amax
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated

# 1 / 127 becomes 0.0078735 in fp16, which is 7e-5 less: so much smaller is every number that a code stands for, and a
# code of a number so near to halfway between two that 7e-5 of it decide is the next.
OF_FP16 = 1e-4


def tokens(rows: int = 64, width: int = 96) -> Tensor:
    """Of very different magnitudes, 2^-8 to 2^8."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=random) * 2.0 ** torch.linspace(-8, 8, rows)[:, None]


def per_token(fmt: str = "int8", rotation: int = 0) -> LayerAssignment:
    return LayerAssignment("layer", "ffn", (8, 96), fmt, fmt, activation_amax=1.0, per_token=True, rotation=rotation)


def test_codes_of_a_token_are_those_of_the_published_rule():
    """Scale max |token| / 127 and the nearest code (torchao's, quantize_int8_rowwise of comfy-kitchen)."""
    x, layer = tokens(), per_token()
    scale = x.abs().amax(-1, keepdim=True) / 127
    expected = (x / scale).round()
    found = layer.rounded_input(x) / scale / (layer.activation_scale * 127)
    torch.testing.assert_close(found, found.round(), rtol=1e-5, atol=1e-5)
    assert (found.round() - expected).abs().max() <= 1 and (found.round() == expected).float().mean() > 0.99
    assert torch.equal(found.abs().amax(-1).round(), torch.full((len(x),), 127.0))
    torch.testing.assert_close(INT8(x), expected * scale)
    same = found.round() == expected
    torch.testing.assert_close(layer.rounded_input(x)[same], INT8(x)[same], rtol=OF_FP16, atol=0)


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_what_one_token_is_changes_no_other(fmt):
    x, layer = tokens(), per_token(fmt)
    before = layer.rounded_input(x)
    x[3] *= 1000
    x[5] = 0
    after = layer.rounded_input(x)
    others = [row for row in range(len(x)) if row not in (3, 5)]
    assert torch.equal(after[others], before[others])
    torch.testing.assert_close(after[3], 1000 * before[3])
    assert torch.equal(after[5], torch.zeros(96))


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_every_token_errs_as_much_relative_to_its_largest(fmt):
    """With one scale of all, the smallest tokens would become zeros."""
    x = tokens()
    layer = per_token(fmt)
    errors = (layer.rounded_input(x) - x).abs().amax(-1) / x.abs().amax(-1)
    step = 1 / 127 if fmt == "int8" else 32 / 448  # the largest between two codes
    assert errors.max() < 0.51 * step
    static = LayerAssignment("layer", "ffn", (8, 96), fmt, fmt, activation_amax=x.abs().max().item())
    if fmt == "int8":
        assert not static.rounded_input(x)[0].any() and layer.rounded_input(x)[0].any()


def test_the_largest_number_of_a_token_is_over_its_last_axis_and_never_zero():
    x = torch.tensor([[[1.0, -3.0], [0.0, 0.0]], [[2.0**-20, 0.0], [5.0, 4.0]]])
    assert token_amax(x).tolist() == [[[3.0], [SMALLEST_TOKEN]], [[SMALLEST_TOKEN], [5.0]]]
    assert torch.tensor(SMALLEST_TOKEN).half() == torch.finfo(torch.float16).tiny


def test_of_a_rotated_token_the_largest_rotated_number_counts():
    """An outlier of 100 among zeros becomes 16 numbers of 25, all of them the code 127."""
    x = torch.zeros(2, 96)
    x[0, 20] = 100
    layer = per_token(rotation=16)
    turned = rotated(layer.rounded_input(x), 16)
    largest = 127 * layer.activation_scale * 25
    assert turned[0, 16:32].abs().tolist() == [pytest.approx(largest, rel=1e-6)] * 16
    assert turned[0, :16].abs().max() < 1e-4 and not turned[1].any()


@pytest.mark.parametrize("rotation", [0, 16])
def test_it_is_that_of_a_formula_in_double_precision(rotation):
    x, layer = tokens().double(), per_token(rotation=rotation)
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double() / 2
    matrix = torch.kron(four, four)
    turned = (x.unflatten(-1, (-1, 16)) @ matrix).flatten(-2) if rotation else x
    largest, scale = turned.abs().amax(-1, keepdim=True), float(torch.tensor(1 / 127).half())
    rounded = (turned / largest / scale).round().clamp(-128, 127) * scale * largest
    expected = (rounded.unflatten(-1, (-1, 16)) @ matrix).flatten(-2) if rotation else rounded
    assert layer.activation_scale == scale
    assert ((layer.rounded_input(x.float()) - expected).norm() / expected.norm()) < 1e-4


def test_its_columns_stand_in_layers_csv():
    row = replace(per_token(rotation=16), weight_amax=torch.ones(1)).row()
    assert (row["per_token"], row["rotation"]) == (True, 16)
    assert row["activation_scale"] == FORMATS["int8"].scales(torch.empty(0), torch.tensor(1.0))[0].item()
    plain = LayerAssignment("layer", "ffn", (8, 96), "int8", "int8", weight_amax=torch.ones(1), activation_amax=1.0)
    assert (plain.row()["per_token"], plain.row()["rotation"]) == (None, None)
