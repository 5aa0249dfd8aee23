"""LoRAs beside third-party networks: each of its layers plus PEFT's formula, and what has them already or cannot."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sd_quant.checkpoints.lora import AdaptedTensor, Update, fused
from sd_quant.errors import ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange.beside import holds_loras, layer_with, with_loras
from sd_quant.interchange.denoiser import QuantizedLayer, quantize_inputs
from sd_quant.interchange.errors import unfolded
from sd_quant.interchange.inputs import Multiplied, RowInteger
from sd_quant.names.lora import Place
from sd_quant.numbers import relative_error

from ..tiny import Tiny
from .conftest import recipe_of

pytestmark = pytest.mark.nightly  # third-party files are written and read
RANK, ALPHA = 3, 6.0
WRITTEN = {  # by the target: the tiny checkpoint, and the recipe
    "comfyui": ("sdxl", {"name": "fp8", "smoothing": "none", "alpha": None}),
    "nunchaku": ("sdxl_wide", {"name": "int4", "rank": 0.1, "smoothing": "none", "alpha": None}),  # it has a branch
    "diffusers_autoround": ("sdxl", {"name": "int4", "activation": None, "smoothing": "none", "alpha": None}),
}


def style(found: Tiny, path, wanted=("to_q", "to_out.0", "ff.net.2", "linear_1")):
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, layer in found.denoiser().named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.endswith(wanted):
            out, width, *kernel = layer.weight.shape
            down = torch.randn(RANK, width, *kernel, generator=random) * width**-0.5
            up = torch.randn(out, RANK, *[1] * len(kernel), generator=random) * 0.1
            flat = f"lora_unet_{name.replace('.', '_')}"
            tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up}
            tensors[f"{flat}.alpha"] = torch.tensor(ALPHA)
        elif isinstance(layer, nn.LayerNorm) and name.endswith(wanted):
            tensors[f"lora_unet_{name.replace('.', '_')}.w_norm"] = layer.weight * 0.1
    save_file(tensors, path)
    return path


@pytest.fixture(params=WRITTEN)
def made(request, tiny, tmp_path):
    name, options = WRITTEN[request.param]
    found = tiny(name)
    adapted = Tiny(fused(found.checkpoint, [(style(found, tmp_path / "style.safetensors"), 1.0)]))

    def written(case: Tiny, folder: str):
        path = case.written(case.assignment(recipe_of(**options), request.param), request.param, tmp_path / folder)
        return case.read(path, request.param)

    return found, adapted, written


@torch.no_grad()
def test_each_layer_computes_what_it_did_and_the_product_of_the_factors_for_its_own_input(made, tmp_path):
    found, adapted, written = made
    candidate = written(found, "base")
    plain = unfolded(candidate, adapted.checkpoint)
    assert not holds_loras(candidate, plain, adapted.checkpoint)
    beside = with_loras(candidate, plain, adapted.checkpoint)
    assert beside.stored_bytes == candidate.stored_bytes and beside.runtime is None
    before, after = found.network(candidate), adapted.network(beside)
    tensors, changed = load_file(tmp_path / "style.safetensors"), set()
    for name, layer in before.named_modules():
        if isinstance(layer, nn.Linear):
            x = torch.randn(2, 64, layer.in_features, generator=torch.Generator().manual_seed(1))
            expected = layer(x)
            if (down := tensors.get(f"lora_unet_{name.replace('.', '_')}.lora_down.weight")) is not None:
                up = tensors[f"lora_unet_{name.replace('.', '_')}.lora_up.weight"]
                expected = expected + ALPHA / RANK * (x @ down.T) @ up.T
                changed.add(name in candidate.layers)
            assert relative_error(expected, after.get_submodule(name)(x)) < 1e-5, name
    assert changed == {True, False}, "layers that the candidate quantizes, and others"


@torch.no_grad()
def test_the_lora_of_a_layer_whose_inputs_are_multiplied_reads_them_as_they_come():
    """SmoothQuant's factor within the layer, its own branch, and inputs that are rounded coarsely."""
    random = torch.Generator().manual_seed(0)
    up, down, weight, bias = (torch.randn(s, generator=random) for s in ((8, 3), (3, 16), (8, 16), (8,)))
    factor, branch = torch.randn(16, generator=random).exp(), (lazy(weight[:, :2]), lazy(torch.ones(2, 16)))
    layer = QuantizedLayer("int4", "1", 1, lazy(weight), Multiplied(factor, False, RowInteger(-3, 3)), branch)
    place = Place("unet", "a", (8, 16))
    update = Update(Path("a"), place, {"down": lazy(down), "up": lazy(up)}, 0.5)
    x, outputs = torch.randn(4, 16, generator=random), []
    for each in (layer, layer_with(layer, AdaptedTensor(lazy(weight), [update]))):
        linear = nn.Linear(16, 8)
        linear.weight.copy_(each.weight.read())
        linear.bias.copy_(bias)
        quantize_inputs(linear, each.inputs, each.branch)
        outputs.append(linear(x))
    assert relative_error(outputs[0] + 0.5 * (x @ down.T) @ up.T, outputs[1]) < 1e-6


def test_one_that_was_made_with_them_has_them_and_one_of_another_strength_is_refused(made, tmp_path):
    found, adapted, written = made
    candidate = written(adapted, "fused")
    assert holds_loras(candidate, unfolded(candidate, adapted.checkpoint), adapted.checkpoint)
    twice = Tiny(fused(found.checkpoint, [(tmp_path / "style.safetensors", 2.0)]))
    with pytest.raises(ConfigError, match=r"^the weights of the candidate .* have 0.[45]\d times what model.loras add"):
        holds_loras(candidate, unfolded(candidate, twice.checkpoint), twice.checkpoint)


@pytest.mark.parametrize(
    ("wanted", "options", "words"),
    [
        ((".norm1",), {}, "layers are norms or biases \\(\\d+: down_blocks.1"),
        ((".conv1",), {}, "layers are convolutions that round their inputs \\(\\d+: down_blocks.0.resnets.0.conv1"),
        (("to_q",), {"smoothing": "folded"}, "have a smoothing that the modules in front compute, so that a LoRA does"),
    ],
)
def test_what_a_tool_could_not_add_is_refused(tiny, tmp_path, wanted, options, words):
    found = tiny("sdxl")
    adapted = Tiny(fused(found.checkpoint, [(style(found, tmp_path / "a.safetensors", wanted), 1.0)]))
    recipe = recipe_of("int8", **({"smoothing": "none", "alpha": None} | ({"alpha": 0.8} if options else {}) | options))
    path = found.written(found.assignment(recipe, "diffusers_modelopt"), "diffusers_modelopt", tmp_path / "out")
    candidate = found.read(path, "diffusers_modelopt")
    with pytest.raises(ConfigError, match=f"^model.loras cannot be added to the candidate .*{words}"):
        with_loras(candidate, unfolded(candidate, adapted.checkpoint), adapted.checkpoint)
