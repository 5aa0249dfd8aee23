"""Files of scaled weights under diffusers' names and under the authors', as diffusers decodes them, and damage."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors
from sd_quant.interchange import READERS
from sd_quant.interchange.diffusers_bfl import scaled_layers
from sd_quant.names.authors import PREFIX, Rows

from ..tiny import changed
from .conftest import PER_ROW_FP8, PLAIN, assert_equal
from .single_files import in_authors_rows, read_all

pytestmark = pytest.mark.commit

BFL = "diffusers_bfl"


@pytest.mark.parametrize("fmt, options", [("fp8", PER_ROW_FP8), ("nvfp4", PLAIN)])
def test_weights_are_what_diffusers_decodes(written_once, fmt, options):
    """``tests.programs`` has diffusers open the file."""
    from diffusers.quantizers.bfl import utils

    case, _, file = written_once(BFL, "flux", fmt, **options)
    stored = load_file(file)
    for name, layer in case.read(file, BFL).layers.items():
        scales = [stored[each] for end in ("", "_2") if (each := f"{name}.weight_scale{end}") in stored]
        decode = utils.dequantize_nvfp4 if layer.format == "nvfp4" else utils.dequantize_fp8r
        assert torch.equal(layer.weight.read(), decode(stored[f"{name}.weight"], *scales)), name
        assert layer.format != "nvfp4" or layer.inputs.common == stored[f"{name}.input_scale"].item()


def with_authors_names(case, file: Path, folder: Path, prefix: str) -> Path:
    """The file of FP8 by row with the names of those who trained the model, their rows stacked as they stack them."""
    tensors = load_file(file)
    scales = {name.removesuffix("_scale"): each for name, each in tensors.items() if name.endswith("_scale")}
    state = in_authors_rows(case.checkpoint, tensors)
    state |= {f"{name}_scale": each for name, each in in_authors_rows(case.checkpoint, scales).items()}
    save_file({prefix + name: each for name, each in state.items()}, folder / "authors.safetensors")
    return folder / "authors.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("family, prefix", [("flux", ""), ("sd3", PREFIX), ("sd21", PREFIX)])
def test_authors_names_are_read_as_diffusers_are(written_once, tmp_path, family, prefix):
    case, _, file = written_once(BFL, family, "fp8", **PER_ROW_FP8)
    read = case.read(file, BFL)
    authors = case.read(with_authors_names(case, file, tmp_path, prefix), BFL)
    assert_equal(read_all(authors), read_all(read))
    inputs, others = ({name: str(layer.inputs) for name, layer in each.layers.items()} for each in (read, authors))
    assert inputs == others


QUERY = "transformer_blocks.0.attn.to_q"


def test_scales_with_comfyui_marks_are_comfyui_files(written_once, tmp_path):
    _, _, file = written_once(BFL, "flux", "fp8", **PER_ROW_FP8)
    mark = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    marked = changed(file, tmp_path, lambda tensors: tensors.update({f"{QUERY}.comfy_quant": mark}))
    assert [name for name, row in READERS.items() if row.recognizes(marked)] == ["comfyui"]


def test_inputs_of_odd_sides_stay(tmp_path):
    """diffusers multiplies codes where both sides are multiples of 16, and dequantized weights elsewhere."""
    file = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.ones(24, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(24)}, file)
    own = scaled_layers(file, read_safetensors(whole_file(file)))["a"]
    assert own.layer((24, 32), [Rows("a.weight", 0, 24, 24)]).inputs is None
    assert own.layer((16, 32), [Rows("a.weight", 0, 16, 24)]).inputs is not None
