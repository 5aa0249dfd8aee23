"""The rules of SGLang's and vLLM-Omni's loaders of Flux, as their sources have them: names, dtypes, shapes, inputs."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from ml_dtypes import float8_e4m3fn
from safetensors.torch import load_file
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from sd_quant.files.tensors import lazy
from sd_quant.interchange.holding import not_held
from sd_quant.interchange.inputs import BlockFloat8
from sd_quant.interchange.sglang_fp8 import LAYOUT, skips
from sd_quant.interchange.stored import LayerTensors
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

from .conftest import recipe_of

pytestmark = pytest.mark.commit

SGLANG, VLLM = "sglang_fp8", "vllm_int8"
SINGLE = "single_transformer_blocks.0"
KEPT = "single_transformer_blocks.1.proj_out"  # by the recipe, in SGLang's
RECIPES = {
    SGLANG: recipe_of("fp8_128x128", "fp8_128", smoothing="none", alpha=None),
    VLLM: recipe_of("int8", smoothing="none", alpha=None, per_token=True),
}


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """``written(target)``: a case, its assignment and the folder."""

    @cache
    def write(target: str):
        case = tiny("flux")
        assignment = case.assignment(RECIPES[target], target)
        if target == SGLANG:
            assignment[KEPT] = not_held(assignment[KEPT], "sensitive")
        return case, assignment, case.written(assignment, target, tmp_path_factory.mktemp(target))

    return write


def config_of(folder: Path) -> dict:
    return json.loads((folder / "transformer/config.json").read_text())["quantization_config"]


# What is written


def test_transformers_decodes_the_numbers_of_the_assignment(written):
    case, assignment, folder = written(SGLANG)
    stored, read = load_file(folder / "transformer/diffusion_pytorch_model.safetensors"), case.read(folder, SGLANG)
    config = FineGrainedFP8Config(**config_of(folder))
    assert config.modules_to_not_convert == config_of(folder)["ignored_layers"]
    assert tuple(config.weight_block_size) == (128, 128)
    held_rows = [row for row in assignment.values() if row.format]
    assert len(held_rows) == 2 * 8 + 2 * 5 - 1
    for row in held_rows:
        codes, scales = codes_and_scales(case.checkpoint, row)
        own = {end: stored[f"{row.name}.{end}"] for end in ("weight", "weight_scale_inv")}
        (decoded,) = Fp8Dequantize(None).convert(own).values()
        assert torch.equal(decoded, FORMATS["fp8_128x128"].dequantize(codes, scales))
        assert torch.equal(read.layers[row.name].weight.read(), decoded)
        assert str(read.layers[row.name].inputs) == "float8_e4m3fn, a scale for 128 numbers"


def test_sglang_ignores_whole_words_and_none_that_would_match_a_quantized_layer(written):
    case, assignment, folder = written(SGLANG)
    ignored = config_of(folder)["ignored_layers"]
    assert {KEPT, "transformer_blocks.0.ff.net.2", "transformer_blocks.1.norm1.linear", "x_embedder"} <= set(ignored)
    assert "proj_out" not in ignored and assignment[f"{SINGLE}.proj_out"].format
    network = empty_denoiser(case.checkpoint)
    linears = [name for name, each in network.named_modules() if isinstance(each, nn.Linear)]
    kept = {name for name in linears if assignment.get(name) is None or assignment[name].format is None}
    assert {name for name in linears if skips(ignored, name)} == kept - {"proj_out"}


@pytest.mark.parametrize(
    "entry, found",
    {
        "proj_out": True, SINGLE: True, f"{SINGLE}.proj_out": True, "0": True, f"{SINGLE}.": True, "proj": False,
        "transformer_blocks.0.proj_out": False, "*.proj_out": False, f"{SINGLE}.proj_out.x": False,
    }.items(),
)  # fmt: skip
def test_an_entry_of_sglangs_is_whole_words_of_a_name(entry, found):
    """``is_layer_skipped`` of a linear that is not stacked."""
    assert found == skips([entry], f"{SINGLE}.proj_out")


def test_vllm_ignores_exact_names_of_parts_and_of_what_is_stacked(written):
    ignored = config_of(written(VLLM)[2])["ignored_layers"]
    expected = {f"{SINGLE}.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_qkv")} | {f"{SINGLE}.norm.linear"}
    assert expected <= set(ignored) and not any("*" in name for name in ignored)
    assert f"{SINGLE}.proj_mlp" not in ignored


ROW = LayerAssignment("layer", "qkv", (200, 256), "fp8_128x128", "fp8_128", weight_amax=torch.ones(1))


def test_such_rows_are_written_with_a_scale(monkeypatch):
    """200 rows are no whole blocks."""
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    codes, (scales,) = ROW.codes_and_scales(weight)
    monkeypatch.setattr("sd_quant.interchange.layouts.codes_and_scales", lambda checkpoint, layer: (codes, scales))
    tensors = {name.removeprefix(f"{ROW.name}."): each.read() for name, each in LAYOUT.tensors(None, ROW).items()}
    assert tensors["weight_scale_inv"].tolist() == [scales[0].tolist(), scales[128].tolist()]
    assert torch.equal(scales[128], scales[199]) and not torch.equal(scales[0], scales[128])
    own = LayerTensors(Path("x"), "a", {end: lazy(tensor) for end, tensor in tensors.items()})
    layer, expected = LAYOUT.layer(own, (200, 256), own.size(), None), codes.float()
    for row, column in np.ndindex(2, 2):
        block = tensors["weight_scale_inv"][row, column]
        expected[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= block
    assert torch.equal(layer.weight.read(), expected)
    assert layer.stored_bytes == 200 * 256 + 4 * 4 and layer.scales == "1 for 128 x 128"


def test_inputs_are_rounded_as_sglangs_kernel_does():
    """In numpy: ``448 / amax`` and ``amax * (1 / 448)`` in fp32, amax at least 1e-10, E4M3 by ml_dtypes."""
    x = torch.randn(3, 5, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 384)
    x[0, 0, :128], x[0, 1, :128] = 0.0, 1e-12
    blocks = x.numpy().reshape(3, 5, 3, 128)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-10))
    codes = np.clip(blocks * (np.float32(448) / largest), -448, 448).astype(float8_e4m3fn).astype(np.float32)
    expected = (codes * (largest * np.float32(1 / 448))).reshape(x.shape)
    found = BlockFloat8(128)(x)
    assert np.array_equal(found.numpy(), expected) and not found[0, 0, :128].any()
    assert BlockFloat8(128)(x.half()).dtype == torch.float16
    assert 0.01 < relative_error(x, found) < 0.04


# What is refused

QUERY = f"{SINGLE}.attn.to_q"
