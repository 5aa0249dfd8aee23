"""Damage to each tensor of each row of the table, by what the row says: its shapes, its dtypes, and finite numbers."""

from pathlib import Path

import pytest
import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import diffusers_bfl, modelopt_export, sglang_fp8, vllm_int8
from sd_quant.interchange.layouts import Layout, Piece, fitting, in_e2m1
from sd_quant.interchange.stored import LayerTensors

pytestmark = pytest.mark.commit

LAYOUTS = {f"modelopt-{name}": layout for name, layout in modelopt_export.LAYOUTS.items()}
LAYOUTS |= {"bfl-rows": diffusers_bfl.ROWS, "bfl-nvfp4": diffusers_bfl.NVFP4}
LAYOUTS |= {"sglang": sglang_fp8.LAYOUT, "vllm": vllm_int8.LAYOUT}
SHAPE = (200, 256)
PIECES = [pytest.param(row, piece, id=f"{name}-{piece.end}") for name, row in LAYOUTS.items() for piece in row.pieces]


def read(layout: Layout, changes: dict[str, torch.Tensor | None], shape=SHAPE) -> torch.Tensor:
    tensors = {piece.end: torch.ones(fitting(piece.shapes, SHAPE)[0]).to(piece.dtypes[0]) for piece in layout.pieces}
    given = {end: lazy(tensor) for end, tensor in (tensors | changes).items() if tensor is not None}
    return layout.layer(LayerTensors(Path("x"), "a", given), shape, 1, None).weight.read()


def refuses(words: str, layout: Layout, *changes) -> None:
    with pytest.raises(ArtifactError, match=f"^x.*{words}.*; "):
        read(layout, *changes)


def test_a_byte_has_the_first_number_in_its_low_half():
    """ComfyUI's has it in the high half: such a file would be read as another model, and its images be noise."""
    assert in_e2m1(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist() == [[0.5, 1.0, 0.0, -6.0]]


@pytest.mark.parametrize("layout, piece", PIECES)
def test_a_damaged_tensor_is_refused_by_name(layout: Layout, piece: Piece):
    shape, dtype = fitting(piece.shapes, SHAPE)[0], piece.dtypes[0]
    if piece.optional:
        read(layout, {piece.end: None})
    else:
        refuses(f"has no '{piece.end}' beside", layout, {piece.end: None})
    sound = torch.ones(shape).to(dtype)
    refuses(rf"{piece.end}' is \[2.* in .*, expected \[", layout, {piece.end: sound.expand(2, 3, *shape)})
    refuses(f"{piece.end}' is .* in float64, expected .* in ", layout, {piece.end: sound.double()})
    if dtype.is_floating_point and piece.holds != "the inputs' scale":
        refuses(f"{piece.end}' holds NaN", layout, {piece.end: (sound.float() * torch.nan).to(dtype)})


ODD = [("bfl-nvfp4", (8, 100)), ("sglang", (8, 64)), ("vllm", (8, 4, 1, 1)), ("bfl-nvfp4", ())]


@pytest.mark.parametrize("name, shape", ODD)
def test_a_weight_that_the_layout_does_not_hold_is_refused(name, shape):
    refuses("expected a linear whose inputs are a multiple of", LAYOUTS[name], {}, shape)
