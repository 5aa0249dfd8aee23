"""Files for ComfyUI of every family: what it reads off a file before it opens it.

That is written down here from ComfyUI's ``model_detection.py``, ``utils.py`` and ``ops.py``. ComfyUI itself opens
some of these files in ``tests.programs``. ``test_round_trip`` holds their weights against the reader, and
``test_comfyui`` the reader against comfy-kitchen.
"""

import pytest
import torch

from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header
from sd_quant.interchange.comfyui import METADATA
from sd_quant.interchange.comfyui_marks import e8m0
from sd_quant.names.authors import PREFIX
from sd_quant.names.nemo import PREFIX as NETWORKS
from sd_quant.names.sgm import PREFIXES
from sd_quant.quantization.formats import FORMATS

from .cases import PLAIN
from .comfyui_files import marks_of
from .conftest import recipe_of

pytestmark = pytest.mark.commit

DIFFUSERS = ("down_blocks.", "up_blocks.", "transformer_blocks.", "single_transformer_blocks.")
# by family: a tensor that ComfyUI tells the model by, and others that it reads a size off: [rows, columns] as they are
DETECTED = {
    "sd15": ("input_blocks.0.0.weight", ["input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"]),
    "sd21": ("input_blocks.0.0.weight", ["input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"]),
    "sdxl": ("input_blocks.0.0.weight", ["input_blocks.3.1.transformer_blocks.0.attn2.to_k.weight",
                                         "label_emb.0.0.weight"]),
    "sd3": ("joint_blocks.0.context_block.attn.qkv.weight",
            ["y_embedder.mlp.0.weight", "x_embedder.proj.weight", "context_embedder.weight",
             "final_layer.linear.weight"]),
    "flux": ("double_blocks.0.img_attn.norm.key_norm.scale",
             ["img_in.weight", "txt_in.weight", "vector_in.in_layer.weight"]),
    "pixart": ("t_block.1.weight", ["y_embedder.y_proj.fc1.weight", "final_layer.linear.weight"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(written_once):
    """A tiny checkpoint, its assignment, the path, the denoiser's tensors without prefix, and the metadata."""

    def write(family: str, fmt: str, options: dict) -> tuple:
        case, assignment, path = written_once("comfyui", family, fmt, **options)
        tensors, metadata = read_header(whole_file(path))
        prefix = PREFIX if family == "sdxl" else ""
        state = {name.removeprefix(prefix): each.read() for name, each in tensors.items() if name.startswith(prefix)}
        return case, assignment, path, state, metadata

    return write


@pytest.mark.slow
@pytest.mark.parametrize("family", DETECTED)
def test_comfyui_tells_the_model_and_finds_the_marks(written, family):
    """In NVFP4, which halves a width, and with every layer that a recipe may quantize."""
    case, assignment, path, state, metadata = written(family, "nvfp4", PLAIN)
    marks, (told, sized) = marks_of(state), DETECTED[family]
    assert METADATA not in metadata and marks  # names in it have the prefix in one of ComfyUI's loaders alone
    assert told in state and not any(name.startswith(DIFFUSERS) for name in state)  # with these it loses marks
    shapes = case.denoiser().state_dict()
    for name in sized:
        assert state[name].dtype == torch.float16 and name.removesuffix(".weight") not in marks
    assert state[sized[0]].shape[1] in {each.shape[1] for each in shapes.values() if each.ndim > 1}
    packed = {name.removesuffix(".weight") for name, each in state.items()
              if name.endswith(".weight") and each.dtype == torch.uint8}  # fmt: skip
    assert packed == marks.keys() and all(f"{layer}.input_scale" in state for layer in marks)
    assert path.name == {"sdxl": "sdxl"}.get(family, case.component) + ".safetensors"


@pytest.mark.slow
def test_the_same_assignment_gives_the_same_bytes(tiny, tmp_path):
    case = tiny("sdxl")
    assignment = case.assignment(recipe_of("int8", **PLAIN), "comfyui")
    first, second = (case.written(assignment, "comfyui", tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    starts = [next(start for start in PREFIXES if name.startswith(start)) for name in read_header(whole_file(first))[0]]
    assert tuple(dict.fromkeys(starts)) == PREFIXES[: len(NETWORKS)]  # in another process too


def test_a_block_of_zeros_has_the_exponent_0():
    """And not 2^-24, which it has in a graph. Of ones it is 2^-8: 1 / 448 rounded up."""
    weight = torch.ones(2, 64)
    weight[1, 32:] = 0
    fmt = FORMATS["mxfp8"]
    scales = fmt.scales(weight, torch.zeros(()))
    assert e8m0(fmt.quantize(weight, *scales), *scales).tolist() == [[119, 119], [119, 0]]


@pytest.mark.slow
def test_inputs_that_a_recipe_leaves_alone_are_marked(written):
    """Without ``full_precision_matrix_mult`` ComfyUI would round them, with a scale that it computes itself."""
    *_, state, _ = written("sd3", "mxfp8", PLAIN | {"activation": None})
    marks = marks_of(state).values()
    assert marks and all(mark == {"format": "mxfp8", "full_precision_matrix_mult": True} for mark in marks)
