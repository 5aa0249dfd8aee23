"""ComfyUI's marks: codes of four and six bits by hand. See ``test_comfyui`` and ``test_layouts``."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import lazy
from sd_quant.interchange.comfyui_marks import Marked
from sd_quant.interchange.denoiser import QuantizedLayer
from sd_quant.interchange.stored import LayerTensors
from sd_quant.names.authors import Rows
from sd_quant.quantization.rotation import rotated

pytestmark = pytest.mark.commit


def layer_of(tensors: dict, entries: dict, shape: tuple[int, int]) -> QuantizedLayer:
    stored = LayerTensors(Path("x"), "a", {name.removeprefix("a."): lazily(each) for name, each in tensors.items()})
    marked = Marked(stored, entries)
    assert marked.unpacked() == shape
    return marked.layer(shape, [Rows("a.weight", 0, shape[0], shape[0])])


def codes_of(*given) -> Tensor:
    return layer_of(*given).weight.read()


def lazily(tensor):
    return lazy(tensor) if isinstance(tensor, Tensor) else tensor


# By hand


def w4a8(**tensors: Tensor) -> dict[str, Tensor]:
    """A row of 32 codes, all of which are 12, or 44 of 63."""
    found = {
        "a.weight": torch.full((1, 16), -52, dtype=torch.int8), "a.weight_s_channel": torch.tensor([0.5]),
        "a.weight_s_rel": torch.tensor([[32.0, 2.6]]).to(torch.float8_e4m3fn),
    }  # fmt: skip
    return found | {f"a.{name}": tensor for name, tensor in tensors.items()}


W4A8_MARK = {"format": "asym_w4a8_int8", "convrot_groupsize": 4}


def test_levels_are_rounded_to_int8_before_the_channels_scale():
    """128 is clamped to 127; 4 * 2.5 has no fraction, a level of the codebook has."""
    plain = codes_of(w4a8(), W4A8_MARK, (1, 32))
    torch.testing.assert_close(rotated(plain, 4)[:, [0, 16]], torch.tensor([[63.5, 5.0]]))
    codebook = torch.zeros(16).index_fill(0, torch.tensor(12), 1.3)  # 41.6 and 3.25
    levels = codes_of(w4a8(weight_codebook=codebook), W4A8_MARK, (1, 32))
    torch.testing.assert_close(rotated(levels, 4)[:, [0, 16]], torch.tensor([[21.0, 1.5]]))
    bits = {"weight": torch.cat([w4a8()["a.weight"], torch.full((1, 8), -86, dtype=torch.int8)], 1)}
    six = codes_of(w4a8(**bits), W4A8_MARK, (1, 32))  # 12 + 2 * 16 - 32
    torch.testing.assert_close(rotated(six, 4)[:, [0, 16]], torch.tensor([[63.5, 15.0]]))
    corrected = w4a8(weight_correction=torch.tensor([[1.0], [3.0]]))
    shifted = layer_of(corrected, W4A8_MARK, (1, 32))
    torch.testing.assert_close(rotated(shifted.weight.read(), 4)[:, [0, 16]], torch.tensor([[64.5, 8.0]]))
    assert shifted.inputs is None


def test_scales_of_groups_may_be_bytes():
    tensors = w4a8()
    as_bytes = tensors | {"a.weight_s_rel": tensors["a.weight_s_rel"].view(torch.uint8)}
    assert torch.equal(codes_of(tensors, W4A8_MARK, (1, 32)), codes_of(as_bytes, W4A8_MARK, (1, 32)))


@pytest.mark.parametrize(
    "tensors, entries, words",
    [
        ({}, {"group_size": 3}, "group_size 3"),
        ({}, {"group_size": 24}, "group_size 24"),
        ({}, {"group_size": True}, "group_size True"),
        ({}, {"group_size": 10**9}, "group_size 1000000000"),
        ({}, {"convrot_groupsize": 8}, "convrot_groupsize 8"),
        ({}, {"convrot": False}, "rotates all the same"),
        ({"a.weight": torch.ones(1, 24, dtype=torch.int8), "a.weight_codebook": torch.ones(16)}, {}, "six bits"),
        ({"a.weight": torch.ones(1, 24, dtype=torch.int8), "a.weight_s_rel": torch.ones(1, 4)}, {"group_size": 8},
         "groups of 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tensors, entries, words):
    with pytest.raises(ArtifactError, match=words):
        codes_of(w4a8() | tensors, W4A8_MARK | entries, (1, 32))


@pytest.mark.parametrize("entries", [{"linear_dtype": "int2"}, {"linear_dtype": 8}, {"quant_group_size": 32}])
def test_products_that_no_kernel_has_are_refused(entries):
    tensors = {"a.weight": torch.ones(2, 32, dtype=torch.int8), "a.weight_scale": torch.ones(2)}
    with pytest.raises(ArtifactError, match="linear_dtype"):
        codes_of(tensors, {"format": "convrot_w4a4", "convrot_groupsize": 4} | entries, (2, 64))


def test_inputs_are_int8_where_the_mark_says_so():
    tensors = {"a.weight": torch.ones(2, 32, dtype=torch.int8), "a.weight_scale": torch.ones(2)}
    entries = {"format": "convrot_w4a4", "convrot_groupsize": 64}
    told = [str(layer_of(tensors, entries | more, (2, 64)).inputs) for more in ({}, {"linear_dtype": "int8"})]
    assert told == ["int4, a scale a row, rotated by 64", "int8, a scale a row, rotated by 64"]
